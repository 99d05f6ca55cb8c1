"""Gossip in real processes: replicas differ, evaluation uses their mean, resuming is exact."""

import pytest

from tests.multi.small_run import same, stretto, train, write_run

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]


AVERAGING = ("strategy.wire=fp8", "strategy.exact_every=7", "strategy.consensus_every=1")
WAYS = [
    (3, 1, "sgp"),
    (4, 2, "crossover", "strategy.delay=1", "strategy.groups=2", *AVERAGING),
]
"""Ranks, how many of them have one model, and the strategy.

Ranks that are threads resume under many more: `test_no_trace.py`, `test_local_updates.py`."""


@pytest.mark.parametrize("strategy", WAYS, ids=lambda arguments: " ".join(map(str, arguments)))
def test_processes_gossip_and_go_on_where_they_were_stopped(tmp_path, strategy):
    workers, width, kind, *settings = strategy
    folder = write_run(tmp_path)
    # The run file's table is of another strategy, so it is reset first.
    arguments = ["strategy=", f"strategy.kind={kind}", *settings, "--workers", str(workers)]
    said, whole = train(folder, "whole", *arguments)
    assert "models of the ranks: loss" in said
    step_lines = [line for line in said.splitlines() if line.startswith("step")]
    assert any("% apart" in line for line in step_lines) == (AVERAGING[0] in settings)
    own = {name for name in whole if name.startswith("rank-") and "/strategy/parameters/" in name}
    assert {name.partition("/")[0] for name in own} == {f"rank-{rank}" for rank in range(workers)}
    models = [under(whole, f"rank-{rank}/strategy/parameters/") for rank in range(workers)]
    for rank, model in enumerate(models):  # a group has one
        assert [same(model, other) for other in models[:rank]] == [
            other // width == rank // width for other in range(rank)
        ]
    assert (
        stretto(folder, "train", "run.toml", "run.name=cut", "train.steps=5", *arguments).returncode
        == 0
    )
    _, resumed = train(folder, "cut", *arguments, "--resume")
    assert same(resumed, whole)


def under(tensors, before):
    return {n.removeprefix(before): t for n, t in tensors.items() if n.startswith(before)}
