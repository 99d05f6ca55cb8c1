"""Early stopping: the rule by itself, in the loop, and across a stop and a resume."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.checkpoint import load_newest
from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.errors import CheckpointError, ConfigError, StrettoError
from stretto.run import RunConfig, assemble, prepare
from stretto.telemetry.events import EvalDone, RunEnded
from stretto.train.early_stop import EarlyStop, EarlyStopper, Tally, add_evaluation, stop_reason
from stretto.train.loop import train
from stretto.train.state import resume_state

SETTINGS = [
    "data.samples=50",
    "data.test_samples=21",
    "data.size=8",
    "model.width=4",
    "train.batch=12",
    "train.eval_every=2",
    "train.save_every=100",
    "optim.lr=0.01",
]
NOTHING_IS_BETTER = ["train.early_stop.patience=2", "train.early_stop.min_delta=100.0"]


def result(step, loss, accuracy=None):
    return EvalDone(step=step, epoch=0, loss=loss, accuracy=accuracy)


def tally_of(rule, losses):
    tally = Tally(rule.metric)
    for step, loss in enumerate(losses, 1):
        tally = add_evaluation(rule, tally, result(step, loss))
    return tally


def on_rank(transport, folder, *settings, resume=False, events=None):
    """Train as one rank; return its first step and how it ended."""
    loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={folder}", *settings])
    report = (lambda event: None) if events is None or transport.rank else events.append
    world = World(transport.rank, Mesh((transport.size,)))
    parts = assemble(loaded, prepare(loaded.config), world, transport, report)
    first = resume_state(parts, log=lambda line: None) if resume else 0
    over = bool(parts.early_stopper.stop_reason)
    ended = None if over else train(parts, first)
    parts.strategy.close()
    return first, over, ended


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5, 3.0]),
)
def test_a_run_ends_after_patience_evaluations_without_improvement(losses, patience, delta):
    rule = EarlyStop(patience=patience, min_delta=delta)
    best, dry = math.inf, 0
    for loss in losses:
        better = math.isfinite(loss) and (best == math.inf or best - loss > delta)
        best, dry = (loss, 0) if better else (best, dry + 1)
    assert bool(stop_reason(rule, tally_of(rule, losses))) == (dry >= patience)


def test_a_loss_that_is_not_a_number_is_never_better():
    rule = EarlyStop(patience=3)
    assert tally_of(rule, [math.nan, 2.0, math.nan, -math.inf]) == Tally("loss", 2.0, 2, 2)


def test_accuracy_improves_by_rising():
    rule = EarlyStop(metric="accuracy", patience=2)
    tally = Tally("accuracy")
    for step, accuracy in enumerate([0.5, 0.6, 0.55], 1):
        tally = add_evaluation(rule, tally, result(step, 0.0, accuracy))
    assert tally == Tally("accuracy", 0.6, 2, 1)


def test_the_error_for_a_missing_accuracy_names_the_setting_to_change():
    rule = EarlyStop(metric="accuracy", patience=1)
    with pytest.raises(StrettoError, match=r'step 7 .* train\.early_stop\.metric="loss"'):
        add_evaluation(rule, Tally("accuracy"), result(7, 1.0))


def test_the_stop_reason_has_the_best_value_and_its_step():
    rule = EarlyStop(patience=2)
    assert stop_reason(rule, tally_of(rule, [3.0, 1.25, 2.0, 2.0])) == (
        "stopped early: loss was best after step 2 (1.25), in 2 evaluations none was better"
    )


def test_the_stop_reason_of_a_run_that_never_was_finite_says_so():
    rule = EarlyStop(patience=2)
    assert "was never finite" in stop_reason(rule, tally_of(rule, [math.nan, math.nan]))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_tally_survives_json_with_the_same_bits(loss):
    before, after = EarlyStopper(EarlyStop(patience=2)), EarlyStopper(EarlyStop(patience=2))
    before.observe(result(4, loss))
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.state_dict() == before.state_dict()


def test_a_tally_of_another_metric_is_ignored():
    early_stopper = EarlyStopper(EarlyStop(metric="accuracy", patience=1))
    early_stopper.load_state_dict({"metric": "loss", "best": 0.1, "best_step": 3, "since_best": 9})
    assert early_stopper.stop_reason == ""
    assert early_stopper.state_dict()["best"] is None


def test_an_invalid_tally_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="since_best"):
        EarlyStopper(EarlyStop(patience=1)).load_state_dict({"since_best": "many"})


def test_a_checkpoint_without_a_tally_starts_a_new_one():
    early_stopper = EarlyStopper(EarlyStop(metric="accuracy", patience=1))
    early_stopper.load_state_dict({})
    assert early_stopper.state_dict()["metric"] == "accuracy"


def test_without_a_rule_the_run_never_ends_early():
    early_stopper = EarlyStopper()
    for step in range(100):
        early_stopper.observe(result(step, math.nan))
    assert early_stopper.stop_reason == ""


def test_the_error_for_a_rule_without_patience_names_the_key():
    with pytest.raises(ConfigError, match=r"train\.early_stop\.patience is missing"):
        load(RunConfig, None, ["train.early_stop.metric=accuracy"])


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_stops_after_the_same_evaluation(size, tmp_path):
    settings = [*NOTHING_IS_BETTER, "train.steps=20"]
    ends = run_threads(size, lambda c: on_rank(c, tmp_path, *settings)[2])
    assert [end.step for end in ends] == [6] * size


def test_the_final_event_of_an_early_stop_has_the_reason(tmp_path):
    events = []
    settings = [*NOTHING_IS_BETTER, "train.steps=20"]
    run_threads(2, lambda c: on_rank(c, tmp_path, *settings, events=events))
    assert isinstance(events[-1], RunEnded)
    assert events[-1].stopped.startswith("stopped early: loss was best after step 2")


def test_a_run_that_stopped_early_is_saved_and_reports_it_when_resumed(tmp_path):
    settings = [*NOTHING_IS_BETTER, "train.steps=20"]
    run_threads(2, lambda c: on_rank(c, tmp_path, *settings))
    resumed = run_threads(2, lambda c: on_rank(c, tmp_path, *settings, resume=True))
    assert resumed == [(6, True, None)] * 2


def test_with_more_patience_an_ended_run_can_be_resumed(tmp_path):
    settings = [*NOTHING_IS_BETTER, "train.steps=20"]
    run_threads(1, lambda c: on_rank(c, tmp_path, *settings))
    more = [*settings, "train.early_stop.patience=4"]
    ((first, _, ended),) = run_threads(1, lambda c: on_rank(c, tmp_path, *more, resume=True))
    assert (first, ended.step) == (6, 10)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_a_run_interrupted_anywhere_stops_at_the_same_evaluation(cut, tmp_path):
    run_threads(2, lambda c: on_rank(c, tmp_path, *NOTHING_IS_BETTER, f"train.steps={cut}"))
    settings = [*NOTHING_IS_BETTER, "train.steps=20"]
    resumed = run_threads(3, lambda c: on_rank(c, tmp_path, *settings, resume=True))
    assert [(first, ended.step) for first, _, ended in resumed] == [(cut, 6)] * 3


def test_a_run_started_without_a_rule_can_be_resumed_with_one(tmp_path):
    run_threads(1, lambda c: on_rank(c, tmp_path, "train.steps=2"))
    ((first, _, ended),) = run_threads(
        1, lambda c: on_rank(c, tmp_path, *NOTHING_IS_BETTER, "train.steps=20", resume=True)
    )
    assert (first, ended.step) == (2, 8)


def test_a_checkpoint_includes_the_evaluation_of_its_own_step(tmp_path):
    run_threads(1, lambda c: on_rank(c, tmp_path, *NOTHING_IS_BETTER, "train.steps=4"))
    state = load_newest(tmp_path / "run" / "checkpoints", log=pytest.fail)
    assert state.facts["early_stop"]["since_best"] == 1
