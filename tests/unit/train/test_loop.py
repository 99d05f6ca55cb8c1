"""The loop with real parts on one rank and on several: events, evaluation, checkpoints, resume."""

import math

import pytest
import torch

from stretto.checkpoint import load_one
from stretto.cluster.world import Mesh, World
from stretto.comm.local import run_local
from stretto.config import load
from stretto.errors import CheckpointError, StrettoError
from stretto.run import RunConfig, assemble, prepare
from stretto.telemetry.events import CheckpointSaved, EvalDone, RunEnded, StepDone
from stretto.train.evaluate import evaluate
from stretto.train.loop import train
from stretto.train.state import resume_state, save_state

SETTINGS = [
    "data.samples=50",
    "data.test_samples=21",
    "data.size=8",
    "model.width=4",
    "train.batch=12",
    "train.log_every=2",
    "optim.lr=0.01",
]


def on_rank(channel, folder, *settings, resume=False, events=None):
    """Assemble and train as one rank; return the parts."""
    loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={folder}", *settings])
    report = (lambda event: None) if events is None or channel.rank else events.append
    world = World(channel.rank, Mesh((channel.size,)))
    parts = assemble(loaded, prepare(loaded.config), world, channel, report)
    first = resume_state(parts, log=lambda line: None) if resume else 0
    train(parts, first)
    parts.strategy.close()
    return parts


def weights(parts):
    return torch.cat([p.detach().flatten() for p in parts.model.parameters()])


def test_a_run_reports_steps_evaluations_checkpoints_and_its_end(tmp_path):
    events = []
    run_local(2, lambda channel: on_rank(channel, tmp_path, "train.epochs=2", events=events))
    steps = [e.step for e in events if isinstance(e, StepDone)]
    assert steps == [2, 4, 6, 8, 10]
    assert [e.step for e in events if isinstance(e, EvalDone)] == [5, 10]
    assert [e.step for e in events if isinstance(e, CheckpointSaved)] == [5, 10]
    assert isinstance(events[-1], RunEnded)
    for event in events:
        if isinstance(event, StepDone):
            shares = event.compute_share + event.comm_share + event.data_share
            assert math.isclose(shares, 1.0, abs_tol=1e-6)


def test_a_line_tells_the_last_measurement_since_the_one_before(tmp_path):
    events = []
    gossip = ["strategy.kind=crossover", "strategy.delay=1", "strategy.consensus_every=3"]
    run_local(2, lambda c: on_rank(c, tmp_path, "train.epochs=2", *gossip, events=events))
    apart = {e.step: e.apart for e in events if isinstance(e, StepDone)}
    # Seen in steps 3, 6 and 9, known one later.
    assert [step for step in apart if apart[step] is not None] == [4, 8, 10]
    assert all(0 < apart[step] < 1 for step in (4, 8, 10))


@pytest.mark.parametrize("size", [2, 3])
def test_evaluation_does_not_depend_on_how_many_share_it(size, tmp_path):
    def evaluated(channel):
        loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={tmp_path}"])
        world = World(channel.rank, Mesh((channel.size,)))
        parts = assemble(loaded, prepare(loaded.config), world, channel, lambda event: None)
        result = evaluate(parts, done=1)
        parts.strategy.close()
        return result

    (alone,) = run_local(1, evaluated)
    for shared in run_local(size, evaluated):
        assert math.isclose(shared.loss, alone.loss, rel_tol=1e-6)
        assert math.isclose(shared.accuracy, alone.accuracy, rel_tol=1e-9)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 3), (3, 1)])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped_at_any_world_size(before, after, tmp_path):
    whole = run_local(before, lambda c: on_rank(c, tmp_path / "whole", "train.steps=9"))[0]
    run_local(before, lambda c: on_rank(c, tmp_path / "cut", "train.steps=4"))
    resumed = run_local(after, lambda c: on_rank(c, tmp_path / "cut", "train.steps=9", resume=True))
    if before == after:
        assert torch.equal(weights(resumed[0]), weights(whole))
    else:
        torch.testing.assert_close(weights(resumed[0]), weights(whole), rtol=1e-4, atol=1e-6)
    assert all(torch.equal(weights(parts), weights(resumed[0])) for parts in resumed)


def test_resuming_with_another_batch_is_refused(tmp_path):
    run_local(1, lambda c: on_rank(c, tmp_path, "train.steps=2"))
    with pytest.raises(CheckpointError, match=r"train\.batch = 12, the run has 10"):
        run_local(
            1,
            lambda c: on_rank(c, tmp_path, "train.steps=3", "train.batch=10", resume=True),
        )


@pytest.mark.parametrize(
    "change", ["data.samples=60", "optim.kind=adamw", "optim.momentum=0.5", "model.width=5"]
)
def test_resuming_as_another_run_is_refused_with_the_key_that_changed(change, tmp_path):
    run_local(1, lambda c: on_rank(c, tmp_path, "train.steps=2"))
    with pytest.raises(CheckpointError, match=change.split("=")[0].replace(".", r"\.")):
        run_local(1, lambda c: on_rank(c, tmp_path, "train.steps=3", change, resume=True))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    def spoiled(channel):
        parts = on_rank(channel, tmp_path, "train.steps=2")
        with torch.no_grad():
            parts.model.head.bias.fill_(math.inf)
        with pytest.raises(StrettoError, match=r"head\.bias is not finite after step 3"):
            save_state(parts, 3)

    run_local(2, spoiled)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert all(torch.isfinite(t).all() for t in load_one(saved).under("model").values())


def test_fewer_test_samples_than_ranks_are_evaluated(tmp_path):
    events = []
    settings = ["data.test_samples=2", "train.steps=1"]
    run_local(4, lambda c: on_rank(c, tmp_path, *settings, events=events))
    assert any(isinstance(e, EvalDone) and math.isfinite(e.loss) for e in events)


def test_a_loss_that_is_not_a_number_ends_the_run_with_advice(tmp_path):
    with pytest.raises(StrettoError, match=r"lower optim\.lr"):
        run_local(1, lambda c: on_rank(c, tmp_path, "optim.lr=1e30", "train.steps=8"))


def test_bf16_trains_and_differs_from_fp32(tmp_path):
    fp32, bf16 = (
        weights(run_local(1, lambda c, p=p: on_rank(c, tmp_path / p, f"train.precision={p}"))[0])
        for p in ("fp32", "bf16")
    )
    assert not torch.equal(fp32, bf16)
    assert bf16.dtype == torch.float32
    torch.testing.assert_close(fp32, bf16, rtol=0.1, atol=0.05)
