"""Gossip as real processes: own models, one model to look at, the same bits when resumed."""

import pytest

from tests.multi.small_run import same, stretto, train, write_run

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]


@pytest.mark.parametrize("strategy", [("crossover", "strategy.delay=1"), ("sgp",)], ids=" ".join)
def test_processes_gossip_and_go_on_where_they_were_stopped(tmp_path, strategy):
    kind, *settings = strategy
    folder = write_run(tmp_path)
    # The run file's table is one of another strategy: it is taken back first.
    words = ["strategy=", f"strategy.kind={kind}", *settings, "--workers", "3"]
    said, whole = train(folder, "whole", *words)
    assert "ranks' own models: loss" in said
    own = {name for name in whole if name.startswith("rank-") and "/strategy/parameters/" in name}
    assert {name.partition("/")[0] for name in own} == {"rank-0", "rank-1", "rank-2"}
    assert (
        stretto(folder, "train", "run.toml", "run.name=cut", "train.steps=5", *words).returncode
        == 0
    )
    _, resumed = train(folder, "cut", *words, "--resume")
    assert same(resumed, whole)
