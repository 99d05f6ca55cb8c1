"""Spans and timelines of a rank, measured or predicted, and their Chrome trace files.

A run records spans with a `Recorder`. The simulator makes the same `Timeline` values, so that one
Chrome or Perfetto trace can show prediction and measurement side by side.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.telemetry.sinks import write_atomically

_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class Span:
    """A named interval from ``start_s`` to ``end_s`` on the rank's own clock."""

    name: str
    lane: str
    """The thread or stream it occupied ("compute", "comm", ...): one row of the trace."""
    start_s: float
    end_s: float
    step: int = -1
    """The optimizer step it belongs to; -1 outside steps."""
    num_bytes: int = 0
    """Bytes that it transferred; 0 where it transferred nothing."""

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
    """Collects spans from any thread; keeps the latest ``max_spans`` and counts dropped ones."""

    def __init__(
        self, rank: int, *, clock: Callable[[], float] = time.monotonic, max_spans: int = 100_000
    ) -> None:
        self.clock = clock
        self._rank = rank
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._num_added = 0
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, lane: str, *, step: int = -1, num_bytes: int = 0) -> Iterator[None]:
        """Record the time of the with block, also when it raises."""
        start_s = self.clock()
        try:
            yield
        finally:
            self.add(Span(name, lane, start_s, self.clock(), step, num_bytes))

    def add(self, span: Span) -> None:
        """Record a span that the caller timed with this recorder's clock."""
        with self._lock:
            self._spans.append(span)
            self._num_added += 1

    @property
    def num_dropped(self) -> int:
        """Number of old spans that were dropped to bound the memory."""
        with self._lock:
            return self._num_added - len(self._spans)

    def timeline(self) -> Timeline:
        """Return the spans kept so far; recording goes on."""
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


def chrome_trace(timelines: Iterable[Timeline]) -> dict[str, Any]:
    """Return a trace for Perfetto and ``chrome://tracing``, with a process per rank.

    Each lane is a named thread. Times are in microseconds. ``args`` holds the exact seconds, so
    that reading a trace returns equal timelines.

    Raises:
        StrettoError: Two timelines have the same rank.
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
        events += _trace_events_of_rank(timeline)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(path: Path, timelines: Iterable[Timeline]) -> None:
    """Write `chrome_trace` to ``path`` atomically."""
    write_atomically(path, json.dumps(chrome_trace(timelines), separators=(",", ":")))


def read_chrome_trace(path: Path) -> list[Timeline]:
    """Return the timelines of a file that `write_chrome_trace` wrote, exactly as they were."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return _parse_timelines(events)
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise StrettoError(
            f"cannot read the trace {path}: {type(wrong).__name__}: {wrong}; "
            "expected a file written by write_chrome_trace"
        ) from wrong


def _trace_events_of_rank(timeline: Timeline) -> list[dict[str, Any]]:
    lanes = {lane: tid for tid, lane in enumerate(dict.fromkeys(s.lane for s in timeline.spans))}
    named = [_metadata_event("process_name", timeline.rank, 0, f"rank {timeline.rank}")]
    named += [
        _metadata_event("thread_name", timeline.rank, tid, lane) for lane, tid in lanes.items()
    ]
    return named + [_span_event(timeline.rank, lanes[s.lane], s) for s in timeline.spans]


def _metadata_event(kind: str, rank: int, tid: int, name: str) -> dict[str, Any]:
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


def _parse_timelines(events: Iterable[Mapping[str, Any]]) -> list[Timeline]:
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
