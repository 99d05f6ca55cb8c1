"""Reading a run from its folder, also after resumptions."""

from datetime import UTC, datetime, timedelta

import pytest

from stretto.errors import ConfigError
from stretto.report.run_records import (
    RunRecord,
    evaluations,
    last_end,
    last_start,
    load_run_record,
    logged_steps,
    running_seconds,
)
from stretto.telemetry.events import CheckpointSaved, EvalDone, RunEnded
from stretto.telemetry.sinks import JsonLines, TimestampedEvent
from stretto.telemetry.timeline import write_chrome_trace
from tests.unit.report.examples import start, step, timeline

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
END = RunEnded(3, 1.0, 0.1, 0.9, 640.0)


def at(seconds, event):
    return TimestampedEvent(BEGIN + timedelta(seconds=seconds), event)


def keep(path, *events):
    sink = JsonLines(path, append=True)
    for event in events:
        sink(event)
    sink.close()


def test_a_folder_with_everything_is_read_whole(tmp_path):
    keep(tmp_path / "events.jsonl", start(), step(1))
    write_chrome_trace(tmp_path / "trace" / "rank-0.json", [timeline(0)])
    (tmp_path / "resolved.toml").write_text("[model]\n")
    record = load_run_record(tmp_path, "mine")
    assert record.name == "mine"
    assert record.events == [start(), step(1)]
    assert record.timelines == [timeline(0)]
    assert record.config_toml == "[model]\n"
    assert record.facts["strategy"] == "allreduce"


def test_a_run_without_a_name_has_the_name_of_its_folder(tmp_path):
    keep(tmp_path / "gossip-8" / "events.jsonl", start())
    assert load_run_record(tmp_path / "gossip-8").name == "gossip-8"


def test_a_config_alone_is_a_run(tmp_path):
    (tmp_path / "resolved.toml").write_text("")
    assert load_run_record(tmp_path).events == []


def test_ranks_are_ordered_by_number_not_by_file_name(tmp_path):
    for rank in (10, 2, 0):
        write_chrome_trace(tmp_path / "trace" / f"rank-{rank}.json", [timeline(rank)])
    assert [each.rank for each in load_run_record(tmp_path).timelines] == [0, 2, 10]


@pytest.mark.parametrize("folder", [".", "missing"])
def test_a_folder_without_a_run_is_the_callers_mistake(tmp_path, folder):
    with pytest.raises(ConfigError, match="holds no run"):
        load_run_record(tmp_path / folder)


def test_the_time_of_an_interruption_does_not_count():
    kept = [at(0, start()), at(5, step(1)), at(1000, start()), at(1002, step(2))]
    assert running_seconds(kept) == [0.0, 5.0, 5.0, 7.0]


def test_running_time_never_decreases_if_the_wall_clock_is_set_back():
    kept = [at(10, start()), at(15, step(1)), at(3, step(2)), at(4, step(3))]
    assert running_seconds(kept) == [0.0, 5.0, 5.0, 6.0]


def test_steps_done_again_after_a_resumption_count_once():
    done = [step(1, 9.0), step(2, 8.0), step(3, 7.0)]
    record = RunRecord("r", [start(), *done, start(), step(2, 6.0), step(3, 5.0)])
    assert [(m.step.step, m.step.loss) for m in logged_steps(record)] == [
        (1, 9.0),
        (2, 6.0),
        (3, 5.0),
    ]


def test_evaluations_done_again_after_a_resumption_count_once():
    first, again = EvalDone(2, 0, 1.0, 0.1), EvalDone(2, 0, 0.5, 0.2)
    assert evaluations(RunRecord("r", [first, start(), again])) == [again]


def test_without_kept_times_a_step_is_placed_by_the_step_times():
    record = RunRecord("r", [step(1, step_s=0.5), step(5, step_s=0.25)])
    assert [moment.seconds for moment in logged_steps(record)] == [0.5, 1.5]


def test_a_run_that_was_resumed_after_its_end_has_not_ended():
    assert last_end(RunRecord("r", [start(), END, start(), step(4)])) is None


def test_a_checkpoint_event_after_the_end_keeps_the_run_ended():
    saved = CheckpointSaved(3, "c", 10, 0.1)
    assert last_end(RunRecord("r", [start(), END, saved])) == END


def test_the_last_beginning_is_the_one_that_counts():
    record = RunRecord("r", [start(workers=4), start(workers=2)])
    assert last_start(record).workers == 2
