"""What is known about one run: its events, timelines and config, read back from its folder."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stretto.errors import ConfigError
from stretto.telemetry.events import EvalDone, Event, RunEnded, RunStarted, StepDone
from stretto.telemetry.sinks import Stamped, read_stamped
from stretto.telemetry.timeline import Timeline, read_chrome_trace


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run as the report sees it."""

    name: str
    events: Sequence[Event]
    timelines: Sequence[Timeline] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    config_toml: str = ""
    seconds: Sequence[float] = ()
    """When each event came, in seconds of running; empty where nobody kept the time."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A logged step with the time at which it was reached."""

    step: StepDone
    seconds: float


def load_run(run_dir: Path, name: str | None = None) -> RunRecord:
    """Read ``events.jsonl``, ``trace/rank-*.json`` and ``resolved.toml``, whichever exist."""
    events_path, config_path = run_dir / "events.jsonl", run_dir / "resolved.toml"
    traces = sorted((run_dir / "trace").glob("rank-*.json"))
    if not (events_path.exists() or config_path.exists() or traces):
        raise ConfigError(
            f"{run_dir} holds no run: expected events.jsonl, resolved.toml or trace/rank-*.json "
            "in it; give the folder that a run wrote"
        )
    stamped = read_stamped(events_path) if events_path.exists() else []
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


def running_seconds(stamped: Sequence[Stamped]) -> list[float]:
    """Return for each event how long the run had been running.

    The clock rests between the last word before an interruption and the first after it.
    """
    seconds: list[float] = []
    running_s = 0.0
    for before, now in zip([None, *stamped], stamped, strict=False):
        if before is not None and not isinstance(now.event, RunStarted):
            running_s += max(0.0, (now.time - before.time).total_seconds())
        seconds.append(running_s)
    return seconds


def started(record: RunRecord) -> RunStarted | None:
    """Return how the run last began, if it said so."""
    return next((each for each in reversed(record.events) if isinstance(each, RunStarted)), None)


def ended(record: RunRecord) -> RunEnded | None:
    """Return how the run ended; None where it was interrupted or is still going on."""
    edges = (each for each in reversed(record.events) if isinstance(each, RunStarted | RunEnded))
    last = next(edges, None)
    return last if isinstance(last, RunEnded) else None


def moments(record: RunRecord) -> list[Moment]:
    """Return the logged steps that count: what a resumption did again counts once, the last time.

    Without kept times a step is placed by the step times before it.
    """
    kept: list[Moment] = []
    times = record.seconds or [math.nan] * len(record.events)
    for event, seconds in zip(record.events, times, strict=True):
        if isinstance(event, StepDone):
            while kept and kept[-1].step.step >= event.step:
                kept.pop()
            kept.append(Moment(event, _placed(event, seconds, kept)))
    return kept


def evaluations(record: RunRecord) -> list[EvalDone]:
    """Return the evaluations that count, as `moments` does for steps."""
    kept: list[EvalDone] = []
    for event in record.events:
        if isinstance(event, EvalDone):
            while kept and kept[-1].step >= event.step:
                kept.pop()
            kept.append(event)
    return kept


def _placed(event: StepDone, seconds: float, before: Sequence[Moment]) -> float:
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
