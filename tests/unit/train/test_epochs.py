"""Virtual epochs change counting, evaluation and checkpoints, but not the samples."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.run import RunConfig, assemble, prepare
from stretto.telemetry.events import CheckpointSaved, EvalDone, StepDone
from stretto.train.config import TrainConfig
from stretto.train.loop import train
from stretto.train.run_parts import RunParts
from stretto.train.state import resume_state
from stretto.train.step import iterate_rank_samples

SETTINGS = [
    "data.samples=50",
    "data.test_samples=4",
    "data.size=8",
    "model.width=4",
    "train.batch=12",
    "train.log_every=1",
    "optim.lr=0.01",
]


def bare_parts(num_samples, batch, epoch_samples, *, rank=0, size=1, **lengths):
    """Return parts with only the fields that counting and sampling need."""
    return RunParts(
        config=TrainConfig(batch=batch, epoch_samples=epoch_samples, **lengths),
        seed=5,
        world=None,
        transport=SimpleNamespace(rank=rank, size=size),
        model=None,
        optimizer=None,
        strategy=None,
        source=SimpleNamespace(num_samples=num_samples),
        test_source=None,
        rate_at=None,
        report=None,
        recorder=None,
    )


def on_rank(transport, folder, *more, events, resume=False):
    loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={folder}", *more])
    world = World(transport.rank, Mesh((transport.size,)))
    report = (lambda event: None) if transport.rank else events.append
    parts = assemble(loaded, prepare(loaded.config), world, transport, report)
    first = resume_state(parts, log=lambda line: None) if resume else 0
    train(parts, first)
    parts.strategy.close()
    return first


@settings(deadline=None)
@given(
    num_samples=st.integers(1, 60),
    batch=st.integers(1, 20),
    epoch_samples=st.integers(1, 200),
    steps=st.integers(1, 25),
    size=st.integers(1, 3),
)
def test_the_sequence_of_samples_does_not_depend_on_the_length_of_an_epoch(
    num_samples, batch, epoch_samples, steps, size
):
    for rank in range(size):
        one, other = (
            iterate_rank_samples(
                bare_parts(num_samples, batch, length, rank=rank, size=size, steps=steps), 0
            )
            for length in (None, epoch_samples)
        )
        for plain, virtual in zip(one, other, strict=True):
            assert plain.samples.tolist() == virtual.samples.tolist()
            assert plain.epoch == virtual.epoch


@given(batch=st.integers(1, 50), epoch_samples=st.integers(1, 500), epochs=st.integers(1, 5))
def test_an_epoch_has_the_fewest_steps_that_contain_its_samples(batch, epoch_samples, epochs):
    parts = bare_parts(77, batch, epoch_samples, epochs=epochs)
    assert (parts.epoch_steps - 1) * batch < epoch_samples <= parts.epoch_steps * batch
    assert parts.total_steps == epochs * parts.epoch_steps


def test_by_default_an_epoch_is_one_pass_over_the_data():
    parts = bare_parts(50, 12, None, epochs=2)
    assert (parts.pass_steps, parts.epoch_steps, parts.total_steps) == (5, 5, 10)


def test_evaluations_and_checkpoints_follow_the_virtual_epoch(tmp_path):
    events = []
    more = ["train.epoch_samples=30", "train.epochs=3"]
    run_threads(2, lambda c: on_rank(c, tmp_path, *more, events=events))
    assert [e.step for e in events if isinstance(e, EvalDone)] == [3, 6, 9]
    assert [e.step for e in events if isinstance(e, CheckpointSaved)] == [3, 6, 9]


def test_events_count_virtual_epochs(tmp_path):
    events = []
    more = ["train.epoch_samples=30", "train.epochs=2"]
    run_threads(1, lambda c: on_rank(c, tmp_path, *more, events=events))
    assert [e.epoch for e in events if isinstance(e, StepDone)] == [0, 0, 0, 1, 1, 1]
    assert [e.epoch for e in events if isinstance(e, EvalDone)] == [0, 1]


@pytest.mark.parametrize("then", ["train.epoch_samples=12", "train.epoch_samples=1000"])
def test_a_resumed_run_may_have_another_epoch_length(then, tmp_path):
    events = []
    run_threads(1, lambda c: on_rank(c, tmp_path, "train.steps=3", events=events))
    more = [then, "train.steps=5"]
    (first,) = run_threads(1, lambda c: on_rank(c, tmp_path, *more, events=events, resume=True))
    assert first == 3
