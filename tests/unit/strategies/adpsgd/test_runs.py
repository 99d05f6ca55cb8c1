"""Whole runs of asynchronous gossip: looked at and saved at any time, and resumed by each rank."""

import math

import pytest
import torch

from stretto.checkpoint import load_newest
from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.errors import ConfigError
from stretto.run import RunConfig, assemble, prepare
from stretto.strategies import STRATEGIES
from stretto.telemetry.events import CheckpointSaved, EvalDone
from stretto.train.loop import train
from stretto.train.state import resume_state

SETTINGS = [
    "strategy.kind=adpsgd",
    "data.samples=48",
    "data.test_samples=8",
    "data.size=8",
    "model.width=4",
    "train.batch=12",
    "train.steps=6",
    "optim.lr=0.01",
]


def parts_of(transport, folder, *settings, report=lambda _event: None):
    loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={folder}", *settings])
    world = World(transport.rank, Mesh((transport.size,)))
    return assemble(loaded, prepare(loaded.config), world, transport, report)


def test_one_word_is_enough():
    config = load(RunConfig, None, ["strategy.kind=adpsgd"]).config
    assert config.strategy == STRATEGIES["adpsgd"]()
    with pytest.raises(ConfigError, match=r"strategy\.wire"):
        load(RunConfig, None, ["strategy.kind=adpsgd", "strategy.wire=bf16"])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seldom", [[], ["train.clip_norm=0.1"]])
def test_a_run_may_be_evaluated_and_saved_after_every_step(size, seldom, tmp_path):
    events = []

    def on_rank(transport):
        report = events.append if transport.rank == 0 else lambda _event: None
        often = ["train.eval_every=1", "train.save_every=1", *seldom]
        parts = parts_of(transport, tmp_path, *often, report=report)
        train(parts)
        parts.strategy.close()

    run_threads(size, on_rank)
    looks = [event for event in events if isinstance(event, EvalDone)]
    assert [event.step for event in looks] == list(range(1, 7))
    assert all(math.isfinite(event.local_loss) and event.consensus_distance >= 0 for event in looks)
    assert sum(isinstance(event, CheckpointSaved) for event in events) == 6


@pytest.mark.parametrize(("before", "after"), [(3, 3), (3, 4), (3, 1)])
def test_each_rank_goes_on_with_its_own_model_and_others_with_the_mean(before, after, tmp_path):
    def first(transport):
        parts = parts_of(transport, tmp_path)
        train(parts)
        parts.strategy.close()

    run_threads(before, first)
    saved = load_newest(tmp_path / "run" / "checkpoints", log=pytest.fail)

    def again(transport):
        parts = parts_of(transport, tmp_path, "train.steps=9")
        step = resume_state(parts, log=pytest.fail)
        parts.strategy.restore_local()
        names = dict(parts.model.named_parameters())
        own = f"rank-{transport.rank}/strategy"
        kept = saved.tensors_under(f"{own}/parameters" if before == after else "model")
        assert all(torch.equal(kept[name], p.detach()) for name, p in names.items())
        if before == after:
            remembered = saved.tensors_under(f"{own}/optimizer")
            for name, p in names.items():
                buffer = parts.optimizer.state[p]["momentum_buffer"]
                assert torch.equal(remembered[f"{name}/momentum_buffer"], buffer)
        train(parts, step)
        parts.strategy.close()
        return step

    assert run_threads(after, again) == [6] * after
