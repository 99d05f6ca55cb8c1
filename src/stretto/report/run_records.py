"""The records of one run: its events, timelines and config, read from the run's folder."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stretto.errors import ConfigError
from stretto.telemetry.events import EvalDone, Event, RunEnded, RunStarted, StepDone
from stretto.telemetry.sinks import TimestampedEvent, read_timestamped_events
from stretto.telemetry.timeline import Timeline, read_chrome_trace


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The records of one run."""

    name: str
    events: Sequence[Event]
    timelines: Sequence[Timeline] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    config_toml: str = ""
    seconds: Sequence[float] = ()
    """Seconds of running at each event; empty if the times are unknown."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A logged step with the seconds of running at which it was reached."""

    step: StepDone
    seconds: float


def load_run_record(run_dir: Path, name: str | None = None) -> RunRecord:
    """Read ``events.jsonl``, ``trace/rank-*.json`` and ``resolved.toml``, whichever exist.

    Raises:
        ConfigError: None of them exists.
    """
    events_path, config_path = run_dir / "events.jsonl", run_dir / "resolved.toml"
    traces = sorted((run_dir / "trace").glob("rank-*.json"))
    if not (events_path.exists() or config_path.exists() or traces):
        raise ConfigError(
            f"{run_dir} holds no run: expected events.jsonl, resolved.toml or trace/rank-*.json "
            "in it; give the folder that a run wrote"
        )
    stamped = read_timestamped_events(events_path) if events_path.exists() else []
    events = [each.event for each in stamped]
    timelines = [timeline for path in traces for timeline in read_chrome_trace(path)]
    return RunRecord(
        name=name or run_dir.resolve().name,
        events=events,
        timelines=sorted(timelines, key=lambda timeline: timeline.rank),
        facts=_facts(events),
        config_toml=config_path.read_text(encoding="utf-8") if config_path.exists() else "",
        seconds=running_seconds(stamped),
    )


def running_seconds(stamped: Sequence[TimestampedEvent]) -> list[float]:
    """Return, for each event, the seconds that the run had been running.

    The time between an interruption and the resumption does not count.
    """
    seconds: list[float] = []
    running_s = 0.0
    for before, now in zip([None, *stamped], stamped, strict=False):
        if before is not None and not isinstance(now.event, RunStarted):
            running_s += max(0.0, (now.time - before.time).total_seconds())
        seconds.append(running_s)
    return seconds


def last_start(record: RunRecord) -> RunStarted | None:
    """Return the last start event of the run; None if there is none."""
    return next((each for each in reversed(record.events) if isinstance(each, RunStarted)), None)


def last_end(record: RunRecord) -> RunEnded | None:
    """Return the end event of the run; None if it was interrupted or is still running."""
    edges = (each for each in reversed(record.events) if isinstance(each, RunStarted | RunEnded))
    last = next(edges, None)
    return last if isinstance(last, RunEnded) else None


def logged_steps(record: RunRecord) -> list[LoggedStep]:
    """Return the logged steps; of a step that was repeated after a resumption, only the last.

    If the times are unknown, they are estimated from the step times.
    """
    kept: list[LoggedStep] = []
    times = record.seconds or [math.nan] * len(record.events)
    for event, seconds in zip(record.events, times, strict=True):
        if isinstance(event, StepDone):
            while kept and kept[-1].step.step >= event.step:
                kept.pop()
            kept.append(LoggedStep(event, _seconds_of(event, seconds, kept)))
    return kept


def evaluations(record: RunRecord) -> list[EvalDone]:
    """Return the evaluations; of one that was repeated after a resumption, only the last."""
    kept: list[EvalDone] = []
    for event in record.events:
        if isinstance(event, EvalDone):
            while kept and kept[-1].step >= event.step:
                kept.pop()
            kept.append(event)
    return kept


def _seconds_of(event: StepDone, seconds: float, before: Sequence[LoggedStep]) -> float:
    if math.isfinite(seconds):
        return seconds
    last_step, last_s = (before[-1].step.step, before[-1].seconds) if before else (0, 0.0)
    return last_s + event.step_s * max(1, event.step - last_step)


def _facts(events: Sequence[Event]) -> dict[str, str]:
    start = next((each for each in reversed(events) if isinstance(each, RunStarted)), None)
    if start is None:
        return {}
    num_starts = sum(isinstance(each, RunStarted) for each in events)
    facts = {
        "model": start.model,
        "parameters": f"{start.parameters:,}",
        "strategy": start.strategy,
        "workers": str(start.workers),
        "hosts": str(start.hosts),
        "threads per worker": str(start.threads),
        "times resumed": str(num_starts - 1),
    }
    return {**facts, "note": start.note} if start.note else facts
