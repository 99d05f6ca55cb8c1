"""Training with a narrow wire: ranks stay one model, it learns, and a checkpoint has all of it."""

import pytest
import torch
from torch import nn

from stretto.checkpoint import load_newest
from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.errors import CheckpointError
from stretto.run import RunConfig, assemble, prepare
from stretto.strategies import AllReduceConfig, build_strategy
from stretto.telemetry.events import StepDone
from stretto.train.loop import train
from stretto.train.state import resume_state

TASK = ["data.samples=480", "data.test_samples=8", "data.size=16", "data.classes=4"]
TASK += ["model.width=4", "model.classes=4", "strategy.bucket_bytes=2KB", "strategy.algorithm=ring"]
TASK += ["train.batch=48", "train.log_every=1", "optim.lr=0.05", "train.eval_every=1000"]
TOPK = "strategy.wire=topk 10%"
NEVER = "train.save_every=1000"
LEARNS = ["model.width=8", "model.norm=group", "optim.lr=0.1", "optim.momentum=0", NEVER]
LEARNS += ["train.steps=60"]
"""Without momentum: what is sent late and then kept moving for long makes a short run diverge."""


def on_rank(transport, folder, *settings, resume=False):
    """Train, or go on with what is there; return the weights, the losses and what is kept."""
    loaded = load(RunConfig, None, [f"run.folder={folder}", *TASK, *settings])
    world = World(transport.rank, Mesh((transport.size,)))
    losses = []

    def report(event):
        if isinstance(event, StepDone):
            losses.append(event.loss)

    parts = assemble(loaded, prepare(loaded.config), world, transport, report)
    first = resume_state(parts, log=pytest.fail) if resume else 0
    train(parts, first)
    parts.strategy.close()
    return parts.model.state_dict(), losses, parts.strategy.local_state()


def trained(size, folder, *settings, resume=False):
    return run_threads(size, lambda c: on_rank(c, folder, *settings, resume=resume))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_ten_percent_of_the_entries_are_enough_to_learn_and_eight_bits_are_as_good(tmp_path):
    last = {}
    for wire in ("fp32", "fp8", "topk 10%"):
        (weights, losses, _), other = trained(2, tmp_path / wire, *LEARNS, f"strategy.wire={wire}")
        assert same(weights, other[0])
        last[wire] = sum(losses[-5:]) / 5
        assert last[wire] < 0.9 * losses[0], wire
    assert last["fp8"] == pytest.approx(last["fp32"], rel=0.05)


@pytest.mark.parametrize("cut", [1, 3])
def test_stopped_and_resumed_a_sparse_run_has_the_bits_of_an_undisturbed_one(cut, tmp_path):
    undisturbed = trained(3, tmp_path / "whole", TOPK, NEVER, "train.steps=5")
    trained(3, tmp_path / "cut", TOPK, NEVER, f"train.steps={cut}")
    resumed = trained(3, tmp_path / "cut", TOPK, NEVER, "train.steps=5", resume=True)
    for (weights, _, kept), (others, _, kept_too) in zip(undisturbed, resumed, strict=True):
        assert same(weights, others)
        assert same(kept, kept_too)


def test_saving_after_every_step_changes_nothing(tmp_path):
    rarely = trained(2, tmp_path / "rarely", TOPK, NEVER, "train.steps=4")
    often = trained(2, tmp_path / "often", TOPK, "train.save_every=1", "train.steps=4")
    assert all(same(one[0], other[0]) for one, other in zip(rarely, often, strict=True))


def test_a_checkpoint_holds_what_each_rank_has_not_sent(tmp_path):
    ranks = trained(3, tmp_path, TOPK, NEVER, "train.steps=3")
    state = load_newest(tmp_path / "run" / "checkpoints", log=pytest.fail)
    for rank, (_, _, kept) in enumerate(ranks):
        assert len(kept) > 2
        assert all(bool(tensor.any()) for tensor in kept.values())
        assert same(state.tensors_under(f"rank-{rank}/strategy"), kept)
    assert not same(ranks[0][2], ranks[1][2])


@pytest.mark.parametrize(
    ("size", "then", "now"),
    [(2, TOPK, "strategy.wire=own"), (2, "strategy.wire=own", TOPK), (3, TOPK, TOPK)],
)
def test_another_wire_or_another_number_of_ranks_goes_on_with_the_weights(
    size, then, now, tmp_path
):
    trained(2, tmp_path, then, NEVER, "train.steps=2")
    ranks = trained(size, tmp_path, now, NEVER, "train.steps=3", resume=True)
    assert all(same(ranks[0][0], weights) and len(losses) == 1 for weights, losses, _ in ranks)


@pytest.mark.parametrize("bucket_bytes", ["0", "1KB", "1MB"])
def test_other_buckets_are_refused_by_name(bucket_bytes, tmp_path):
    trained(2, tmp_path, TOPK, NEVER, "train.steps=2")
    more = [TOPK, NEVER, "train.steps=3", f"strategy.bucket_bytes={bucket_bytes}"]
    with pytest.raises(
        CheckpointError, match=r"strategy\.bucket_lengths and strategy\.bucket_bytes"
    ):
        trained(2, tmp_path, *more, resume=True)


def test_a_strategy_hands_over_what_it_keeps_by_bucket():
    def work(transport):
        config = AllReduceConfig(algorithm="ring", wire="topk 50%", bucket_bytes=0)
        strategies = [build_strategy(config, transport) for _ in range(2)]
        for strategy in strategies:
            model, _ = strategy.attach(nn.Linear(3, 2), lambda p: torch.optim.SGD(p, lr=0.1))
        strategy = strategies[1]
        strategy.begin(0, 0, True, 0.1)
        model(torch.tensor([[1.0, 2.0, 3.0 + transport.rank]])).sum().backward()
        strategy.after_backward()
        kept = strategy.local_state()
        strategies[0].load_local_state(kept)
        for each in strategies:
            each.close()
        return kept, strategies[0].local_state()

    for kept, handed_over in run_threads(2, work):
        assert sorted(kept) == ["bucket-0/residual", "bucket-1/residual"]
        assert sum(int(tensor.count_nonzero()) for tensor in kept.values()) == 4
        assert same(kept, handed_over)
