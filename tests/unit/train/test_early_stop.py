"""Early stopping: the rule by itself, in the loop, and across a stop and a resumption."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.checkpoint import load_newest
from stretto.cluster.world import Mesh, World
from stretto.comm.local import run_local
from stretto.config import load
from stretto.errors import CheckpointError, ConfigError, StrettoError
from stretto.run import RunConfig, assemble, prepare
from stretto.telemetry.events import EvalDone, RunEnded
from stretto.train.early_stop import EarlyStop, Tally, Watch, judge, verdict
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


def judged(rule, losses):
    tally = Tally(rule.metric)
    for step, loss in enumerate(losses, 1):
        tally = judge(rule, tally, result(step, loss))
    return tally


def on_rank(channel, folder, *settings, resume=False, events=None):
    """Train as one rank; return the step it began with and how it ended."""
    loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={folder}", *settings])
    report = (lambda event: None) if events is None or channel.rank else events.append
    world = World(channel.rank, Mesh((channel.size,)))
    parts = assemble(loaded, prepare(loaded.config), world, channel, report)
    first = resume_state(parts, log=lambda line: None) if resume else 0
    over = bool(parts.watch.verdict)
    ended = None if over else train(parts, first)
    parts.strategy.close()
    return first, over, ended


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5, 3.0]),
)
def test_a_run_is_over_once_patience_evaluations_in_a_row_brought_nothing(losses, patience, delta):
    rule = EarlyStop(patience=patience, min_delta=delta)
    best, dry = math.inf, 0
    for loss in losses:
        better = math.isfinite(loss) and (best == math.inf or best - loss > delta)
        best, dry = (loss, 0) if better else (best, dry + 1)
    assert bool(verdict(rule, judged(rule, losses))) == (dry >= patience)


def test_a_loss_that_is_not_a_number_is_never_better():
    rule = EarlyStop(patience=3)
    assert judged(rule, [math.nan, 2.0, math.nan, -math.inf]) == Tally("loss", 2.0, 2, 2)


def test_accuracy_is_better_when_it_rises():
    rule = EarlyStop(metric="accuracy", patience=2)
    tally = Tally("accuracy")
    for step, accuracy in enumerate([0.5, 0.6, 0.55], 1):
        tally = judge(rule, tally, result(step, 0.0, accuracy))
    assert tally == Tally("accuracy", 0.6, 2, 1)


def test_a_missing_accuracy_is_named_with_the_setting_to_change():
    rule = EarlyStop(metric="accuracy", patience=1)
    with pytest.raises(StrettoError, match=r'step 7 .* train\.early_stop\.metric="loss"'):
        judge(rule, Tally("accuracy"), result(7, 1.0))


def test_the_verdict_tells_the_best_value_and_its_step():
    rule = EarlyStop(patience=2)
    assert verdict(rule, judged(rule, [3.0, 1.25, 2.0, 2.0])) == (
        "stopped early: loss was best after step 2 (1.25), in 2 evaluations none was better"
    )


def test_the_verdict_of_a_run_that_never_was_finite_says_so():
    rule = EarlyStop(patience=2)
    assert "was never finite" in verdict(rule, judged(rule, [math.nan, math.nan]))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_tally_comes_back_from_json_with_the_same_bits(loss):
    before, after = Watch(EarlyStop(patience=2)), Watch(EarlyStop(patience=2))
    before.see(result(4, loss))
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.state_dict() == before.state_dict()


def test_a_tally_of_another_metric_is_left_aside():
    watch = Watch(EarlyStop(metric="accuracy", patience=1))
    watch.load_state_dict({"metric": "loss", "best": 0.1, "best_step": 3, "since_best": 9})
    assert watch.verdict == ""
    assert watch.state_dict()["best"] is None


def test_a_tally_that_cannot_be_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="since_best"):
        Watch(EarlyStop(patience=1)).load_state_dict({"since_best": "many"})


def test_a_checkpoint_without_a_tally_begins_a_new_one():
    watch = Watch(EarlyStop(metric="accuracy", patience=1))
    watch.load_state_dict({})
    assert watch.state_dict()["metric"] == "accuracy"


def test_without_a_rule_nothing_ends_a_run():
    watch = Watch()
    for step in range(100):
        watch.see(result(step, math.nan))
    assert watch.verdict == ""


def test_a_rule_without_patience_is_refused_with_the_key():
    with pytest.raises(ConfigError, match=r"train\.early_stop\.patience is missing"):
        load(RunConfig, None, ["train.early_stop.metric=accuracy"])


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_stops_after_the_same_evaluation(size, tmp_path):
    settings = [*NOTHING_IS_BETTER, "train.steps=20"]
    ends = run_local(size, lambda c: on_rank(c, tmp_path, *settings)[2])
    assert [end.step for end in ends] == [6] * size


def test_the_last_word_of_a_run_that_stopped_early_says_why(tmp_path):
    events = []
    settings = [*NOTHING_IS_BETTER, "train.steps=20"]
    run_local(2, lambda c: on_rank(c, tmp_path, *settings, events=events))
    assert isinstance(events[-1], RunEnded)
    assert events[-1].stopped.startswith("stopped early: loss was best after step 2")


def test_a_run_that_stops_early_saves_there_and_says_so_when_resumed(tmp_path):
    settings = [*NOTHING_IS_BETTER, "train.steps=20"]
    run_local(2, lambda c: on_rank(c, tmp_path, *settings))
    resumed = run_local(2, lambda c: on_rank(c, tmp_path, *settings, resume=True))
    assert resumed == [(6, True, None)] * 2


def test_more_patience_lets_an_ended_run_go_on(tmp_path):
    settings = [*NOTHING_IS_BETTER, "train.steps=20"]
    run_local(1, lambda c: on_rank(c, tmp_path, *settings))
    more = [*settings, "train.early_stop.patience=4"]
    ((first, _, ended),) = run_local(1, lambda c: on_rank(c, tmp_path, *more, resume=True))
    assert (first, ended.step) == (6, 10)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_a_run_cut_anywhere_and_resumed_stops_at_the_evaluation_of_an_undisturbed_one(
    cut, tmp_path
):
    run_local(2, lambda c: on_rank(c, tmp_path, *NOTHING_IS_BETTER, f"train.steps={cut}"))
    settings = [*NOTHING_IS_BETTER, "train.steps=20"]
    resumed = run_local(3, lambda c: on_rank(c, tmp_path, *settings, resume=True))
    assert [(first, ended.step) for first, _, ended in resumed] == [(cut, 6)] * 3


def test_a_run_begun_without_a_rule_is_resumed_under_one(tmp_path):
    run_local(1, lambda c: on_rank(c, tmp_path, "train.steps=2"))
    ((first, _, ended),) = run_local(
        1, lambda c: on_rank(c, tmp_path, *NOTHING_IS_BETTER, "train.steps=20", resume=True)
    )
    assert (first, ended.step) == (2, 8)


def test_the_checkpoint_holds_the_judgement_of_its_own_evaluation(tmp_path):
    run_local(1, lambda c: on_rank(c, tmp_path, *NOTHING_IS_BETTER, "train.steps=4"))
    state = load_newest(tmp_path / "run" / "checkpoints", log=pytest.fail)
    assert state.facts["early_stop"]["since_best"] == 1
