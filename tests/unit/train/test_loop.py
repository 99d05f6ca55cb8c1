"""The training loop on one rank and on several: events, evaluation, checkpoints, resume."""

import math

import pytest
import torch

from stretto.checkpoint import load_checkpoint
from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
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


def on_rank(transport, folder, *settings, resume=False, events=None):
    """Assemble and train as one rank; return the parts."""
    loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={folder}", *settings])
    report = (lambda event: None) if events is None or transport.rank else events.append
    world = World(transport.rank, Mesh((transport.size,)))
    parts = assemble(loaded, prepare(loaded.config), world, transport, report)
    first = resume_state(parts, log=lambda line: None) if resume else 0
    train(parts, first)
    parts.strategy.close()
    return parts


def weights(parts):
    return torch.cat([p.detach().flatten() for p in parts.model.parameters()])


def test_a_run_reports_steps_evaluations_checkpoints_and_its_end(tmp_path):
    events = []
    run_threads(2, lambda transport: on_rank(transport, tmp_path, "train.epochs=2", events=events))
    steps = [e.step for e in events if isinstance(e, StepDone)]
    assert steps == [2, 4, 6, 8, 10]
    assert [e.step for e in events if isinstance(e, EvalDone)] == [5, 10]
    assert [e.step for e in events if isinstance(e, CheckpointSaved)] == [5, 10]
    assert isinstance(events[-1], RunEnded)
    for event in events:
        if isinstance(event, StepDone):
            shares = event.compute_share + event.comm_share + event.data_share
            assert math.isclose(shares, 1.0, abs_tol=1e-6)


def test_a_log_line_has_the_last_measurement_since_the_previous_line(tmp_path):
    events = []
    gossip = ["strategy.kind=crossover", "strategy.delay=1", "strategy.consensus_every=3"]
    run_threads(2, lambda c: on_rank(c, tmp_path, "train.epochs=2", *gossip, events=events))
    consensus_distance = {e.step: e.consensus_distance for e in events if isinstance(e, StepDone)}
    # Measured in steps 3, 6 and 9, known one step later.
    assert [step for step in consensus_distance if consensus_distance[step] is not None] == [
        4,
        8,
        10,
    ]
    assert all(0 < consensus_distance[step] < 1 for step in (4, 8, 10))


@pytest.mark.parametrize("size", [2, 3])
def test_evaluation_does_not_depend_on_the_number_of_ranks(size, tmp_path):
    def evaluated(transport):
        loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={tmp_path}"])
        world = World(transport.rank, Mesh((transport.size,)))
        parts = assemble(loaded, prepare(loaded.config), world, transport, lambda event: None)
        result = evaluate(parts, steps_done=1)
        parts.strategy.close()
        return result

    (single,) = run_threads(1, evaluated)
    for shared in run_threads(size, evaluated):
        assert math.isclose(shared.loss, single.loss, rel_tol=1e-6)
        assert math.isclose(shared.accuracy, single.accuracy, rel_tol=1e-9)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 3), (3, 1)])
def test_a_resumed_run_equals_an_uninterrupted_one_at_any_world_size(before, after, tmp_path):
    whole = run_threads(before, lambda c: on_rank(c, tmp_path / "whole", "train.steps=9"))[0]
    run_threads(before, lambda c: on_rank(c, tmp_path / "cut", "train.steps=4"))
    resumed = run_threads(
        after, lambda c: on_rank(c, tmp_path / "cut", "train.steps=9", resume=True)
    )
    if before == after:
        assert torch.equal(weights(resumed[0]), weights(whole))
    else:
        torch.testing.assert_close(weights(resumed[0]), weights(whole), rtol=1e-4, atol=1e-6)
    assert all(torch.equal(weights(parts), weights(resumed[0])) for parts in resumed)


def test_resuming_with_another_batch_is_refused(tmp_path):
    run_threads(1, lambda c: on_rank(c, tmp_path, "train.steps=2"))
    with pytest.raises(CheckpointError, match=r"train\.batch = 12, the run has 10"):
        run_threads(
            1,
            lambda c: on_rank(c, tmp_path, "train.steps=3", "train.batch=10", resume=True),
        )


@pytest.mark.parametrize(
    "change", ["data.samples=60", "optim.kind=adamw", "optim.momentum=0.5", "model.width=5"]
)
def test_resuming_with_a_changed_setting_is_refused_with_its_key(change, tmp_path):
    run_threads(1, lambda c: on_rank(c, tmp_path, "train.steps=2"))
    with pytest.raises(CheckpointError, match=change.split("=")[0].replace(".", r"\.")):
        run_threads(1, lambda c: on_rank(c, tmp_path, "train.steps=3", change, resume=True))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    def spoiled(transport):
        parts = on_rank(transport, tmp_path, "train.steps=2")
        with torch.no_grad():
            parts.model.head.bias.fill_(math.inf)
        with pytest.raises(StrettoError, match=r"head\.bias is not finite after step 3"):
            save_state(parts, 3)

    run_threads(2, spoiled)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert all(
        torch.isfinite(t).all() for t in load_checkpoint(saved).tensors_under("model").values()
    )


def test_fewer_test_samples_than_ranks_are_evaluated(tmp_path):
    events = []
    settings = ["data.test_samples=2", "train.steps=1"]
    run_threads(4, lambda c: on_rank(c, tmp_path, *settings, events=events))
    assert any(isinstance(e, EvalDone) and math.isfinite(e.loss) for e in events)


def test_a_nan_loss_ends_the_run_with_advice(tmp_path):
    with pytest.raises(StrettoError, match=r"lower optim\.lr"):
        run_threads(1, lambda c: on_rank(c, tmp_path, "optim.lr=1e30", "train.steps=8"))


def test_bf16_trains_and_differs_from_fp32(tmp_path):
    fp32, bf16 = (
        weights(run_threads(1, lambda c, p=p: on_rank(c, tmp_path / p, f"train.precision={p}"))[0])
        for p in ("fp32", "bf16")
    )
    assert not torch.equal(fp32, bf16)
    assert bf16.dtype == torch.float32
    torch.testing.assert_close(fp32, bf16, rtol=0.1, atol=0.05)
