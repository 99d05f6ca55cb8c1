"""Mistakes of ``stretto calibrate`` and ``stretto bench collectives``, before ranks connect."""

import pytest

from stretto.cli.main import main
from stretto.cluster.world import Mesh, World

LAUNCHERS = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


@pytest.fixture
def one_rank(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def two_ranks(monkeypatch):
    """Let the command believe that it is one of two ranks; it must not connect to the other."""
    monkeypatch.setattr("stretto.cluster.detect.detect_world", lambda: World(0, Mesh((2,))))
    monkeypatch.setattr(
        "stretto.bench.calibrate.connect", lambda *_a, **_k: pytest.fail("connected")
    )
    monkeypatch.setattr(
        "stretto.bench.collectives.connect", lambda *_a, **_k: pytest.fail("connected")
    )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("verb", [["calibrate"], ["bench", "collectives"]])
def test_a_single_rank_is_refused_with_how_to_start_more(verb, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(verb) == 2
    said = capsys.readouterr().err
    assert "at least 2 ranks" in said
    assert f"stretto lab --hosts 4 --rate 400mbit -- stretto {' '.join(verb)}" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["calibrate", "--runs", "0"], ["1 run"]),
        (["calibrate", "--out", "missing/cluster.toml"], ["there is no folder", "missing"]),
        (["calibrate", "--out", "wrong.toml"], ["wrong.toml", "ranks_per_host"]),
        (["calibrate", "--device", "tpu"], ["--device tpu", "cpu (Gloo) or cuda (NCCL)"]),
        (["bench", "collectives", "--runs", "0"], ["--runs 0: expected at least 1"]),
        (["bench", "collectives", "--sizes", "big"], ["a size such as"]),
        (["bench", "collectives", "--algorithms", "rign"], ["no algorithm 'rign'"]),
        (["bench", "collectives", "--collective", "gather"], ["no collective 'gather'"]),
        (["bench", "collectives", "--cluster", "none.toml"], ["no cluster description none.toml"]),
        (["bench", "collectives", "--wire", "topk 1%"], ["is no collective"]),
    ],
)
def test_a_mistake_is_named_before_ranks_connect(
    arguments, expected, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.toml").write_text('ranks_per_host = "many"\n')
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert all(text in said.err + said.out for text in expected)
