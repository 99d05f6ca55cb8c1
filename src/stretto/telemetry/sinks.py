"""Sinks that write events: JSON lines as the run's record, plain lines for a log, and a fan-out."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

from stretto.errors import StrettoError
from stretto.telemetry.event_text import event_line
from stretto.telemetry.events import Event, RunStarted, from_record, to_record


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to a temporary file and rename it to ``path``; create missing folders.

    A reader sees the old text or the new text, never a part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Sink(Protocol):
    """A receiver of events, in the order in which they happen."""

    def __call__(self, event: Event) -> None:
        """Handle ``event``; called between steps, so it should be fast."""
        ...

    def close(self) -> None:
        """Close files and restore the terminal; called once at the end, also after a failure."""
        ...


@dataclass(frozen=True, slots=True)
class TimestampedEvent:
    """An event with the wall-clock time at which it was written."""

    time: datetime
    event: Event


def _utc_now() -> datetime:
    return datetime.now(UTC)


class JsonLines:
    """Writes the run's record: one JSON object per line, flushed before the call returns.

    A kill therefore loses at most the line being written. Appending to a file that ends with a
    partial line removes that part first.
    """

    def __init__(
        self, path: Path, append: bool, *, clock: Callable[[], datetime] = _utc_now
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if append:
            _repair_last_line(path)
        self._file = path.open("a" if append else "w", encoding="utf-8")
        self._clock = clock

    def __call__(self, event: Event) -> None:
        """Write ``event`` and flush it to the operating system."""
        record = to_record(event, time=self._clock().isoformat(timespec="microseconds"))
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class PlainLines:
    """Writes one line of text per event, for logs and pipes, without control characters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._steps = 0

    def __call__(self, event: Event) -> None:
        """Write the line of ``event``; characters outside the stream's encoding are escaped."""
        if isinstance(event, RunStarted):
            self._steps = event.steps
        text = event_line(event, steps=self._steps)
        self._stream.write(text.encode(self._encoding, "backslashreplace").decode(self._encoding))
        self._stream.write("\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the stream open: it belongs to the caller."""


class _FanOut:
    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def __call__(self, event: Event) -> None:
        for sink in self._sinks:
            sink(event)

    def close(self) -> None:
        with ExitStack() as closing:  # closes the others even if one fails
            for sink in self._sinks:
                closing.callback(sink.close)


def fan_out(sinks: Iterable[Sink]) -> Sink:
    """Return one sink that passes every event to each of ``sinks``, in their order."""
    return _FanOut(tuple(sinks))


def read_events(path: Path) -> list[Event]:
    """Return the events of a JSON lines file, without their times."""
    return [stamped.event for stamped in read_timestamped_events(path)]


def read_timestamped_events(path: Path) -> list[TimestampedEvent]:
    """Return the events of a JSON lines file with their times.

    A kill can leave a last line without a line break; it is ignored unless it is a whole object.

    Raises:
        StrettoError: Another line cannot be read; the message names it.
    """
    *whole, partial_line = path.read_bytes().split(b"\n")
    if _parse_json_object(partial_line) is not None:
        whole.append(partial_line)
    return [_parse_line(path, number, text) for number, text in enumerate(whole, start=1)]


def _parse_line(path: Path, number: int, text: bytes) -> TimestampedEvent:
    record = _parse_json_object(text)
    if record is None:
        raise StrettoError(f"{path}, line {number}: expected a JSON object, got {text[:60]!r}")
    try:
        return TimestampedEvent(
            datetime.fromisoformat(str(record.get("time"))), from_record(record)
        )
    except (StrettoError, ValueError) as wrong:
        raise StrettoError(f"{path}, line {number}: {wrong}") from None


def _parse_json_object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _repair_last_line(path: Path) -> None:
    """Remove a partial last line of ``path``, or add the line break that a whole one misses."""
    if not path.exists():
        return
    written = path.read_bytes()
    whole, newline, partial_line = written.rpartition(b"\n")
    if not partial_line:
        return
    if _parse_json_object(partial_line) is not None:  # only the line break is missing
        written += b"\n"
    else:
        written = whole + newline
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(written)
    temporary.replace(path)
