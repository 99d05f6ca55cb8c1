"""Spans and timelines: what happened when, on which rank, measured or predicted, in one schema.

The running program records with a `Recorder`; the simulator makes the same `Timeline` values, so
that a prediction and a measurement can be laid side by side in one Chrome or Perfetto trace.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.telemetry.aside import write_aside

_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that took time: from ``start_s`` to ``end_s`` on the rank's own clock."""

    name: str
    lane: str
    """What it kept busy ("compute", "comm", ...); a lane is one row of the trace."""
    start_s: float
    end_s: float
    step: int = -1
    """The optimizer step it belongs to; -1 outside of steps."""
    num_bytes: int = 0
    """How much it moved, where it moved anything."""

    def __post_init__(self) -> None:
        if not -math.inf < self.start_s <= self.end_s < math.inf:  # also refuses NaN
            raise StrettoError(
                f"span {self.name!r} on lane {self.lane!r} goes from {self.start_s} to "
                f"{self.end_s} s: a span needs finite times and an end no earlier than its start"
            )


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of one rank, in the order in which they ended or were added."""

    rank: int
    spans: tuple[Span, ...]


class Recorder:
    """Collects spans from any thread; keeps the latest ``keep`` and counts what it let go."""

    def __init__(
        self, rank: int, *, clock: Callable[[], float] = time.monotonic, keep: int = 100_000
    ) -> None:
        self.clock = clock
        self._rank = rank
        self._spans: deque[Span] = deque(maxlen=keep)
        self._num_added = 0
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, lane: str, *, step: int = -1, num_bytes: int = 0) -> Iterator[None]:
        """Record the time the body takes, also when it raises: what failed took time too."""
        start_s = self.clock()
        try:
            yield
        finally:
            self.add(Span(name, lane, start_s, self.clock(), step, num_bytes))

    def add(self, span: Span) -> None:
        """Record a span that was timed elsewhere, by the clock of this recorder."""
        with self._lock:
            self._spans.append(span)
            self._num_added += 1

    @property
    def num_dropped(self) -> int:
        """How many of the oldest spans were let go to bound the memory."""
        with self._lock:
            return self._num_added - len(self._spans)

    def timeline(self) -> Timeline:
        """Return what is kept so far; recording goes on."""
        with self._lock:
            return Timeline(self._rank, tuple(self._spans))


def busy_s(spans: Iterable[Span]) -> float:
    """Return the time during which at least one span was open: the length of their union."""
    total_s, covered_until_s = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.end_s > covered_until_s:
            total_s += span.end_s - max(span.start_s, covered_until_s)
            covered_until_s = span.end_s
    return total_s


def exposed_s(timeline: Timeline, *, comm_lanes: Collection[str], compute_lane: str) -> float:
    """Return the time spent in communication while ``compute_lane`` stood still.

    This is what overlap has failed to hide: busy with either, less busy with compute.
    """
    compute = [span for span in timeline.spans if span.lane == compute_lane]
    comm = [span for span in timeline.spans if span.lane in comm_lanes]
    return max(0.0, busy_s(compute + comm) - busy_s(compute))


def chrome_trace(timelines: Iterable[Timeline]) -> dict[str, Any]:
    """Return the trace that Perfetto and ``chrome://tracing`` open: a process per rank.

    Each lane is a named thread. The viewers want microseconds; the exact seconds ride along in
    ``args``, so that reading a trace returns equal timelines. A rank may appear only once.
    """
    events: list[dict[str, Any]] = []
    seen: set[int] = set()
    for timeline in timelines:
        if timeline.rank in seen:
            raise StrettoError(
                f"two timelines for rank {timeline.rank} in one trace: their spans would mix; "
                "write them to separate files"
            )
        seen.add(timeline.rank)
        events += _rank_events(timeline)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(path: Path, timelines: Iterable[Timeline]) -> None:
    """Write `chrome_trace` to ``path``, aside and renamed."""
    write_aside(path, json.dumps(chrome_trace(timelines), separators=(",", ":")))


def read_chrome_trace(path: Path) -> list[Timeline]:
    """Return the timelines that `write_chrome_trace` was given, equal to the last digit."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return _timelines(events)
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise StrettoError(
            f"cannot read the trace {path}: {type(wrong).__name__}: {wrong}; "
            "expected a file written by write_chrome_trace"
        ) from wrong


def _rank_events(timeline: Timeline) -> list[dict[str, Any]]:
    lanes = {lane: tid for tid, lane in enumerate(dict.fromkeys(s.lane for s in timeline.spans))}
    named = [_name_event("process_name", timeline.rank, 0, f"rank {timeline.rank}")]
    named += [_name_event("thread_name", timeline.rank, tid, lane) for lane, tid in lanes.items()]
    return named + [_span_event(timeline.rank, lanes[s.lane], s) for s in timeline.spans]


def _name_event(kind: str, rank: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": {"name": name}}


def _span_event(rank: int, tid: int, span: Span) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": rank,
        "tid": tid,
        "ts": span.start_s * _US_PER_S,
        "dur": (span.end_s - span.start_s) * _US_PER_S,
        "args": {
            "step": span.step,
            "num_bytes": span.num_bytes,
            "start_s": span.start_s,
            "end_s": span.end_s,
        },
    }


def _timelines(events: Iterable[Mapping[str, Any]]) -> list[Timeline]:
    spans: dict[int, list[Span]] = {}
    lanes: dict[tuple[int, int], str] = {}
    for event in events:
        rank = event["pid"]
        of_rank = spans.setdefault(rank, [])
        if event["ph"] == "M" and event["name"] == "thread_name":
            lanes[rank, event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            exact = event["args"]
            times = exact["start_s"], exact["end_s"]
            lane = lanes[rank, event["tid"]]
            of_rank.append(Span(event["name"], lane, *times, exact["step"], exact["num_bytes"]))
    return [Timeline(rank, tuple(of_rank)) for rank, of_rank in spans.items()]
