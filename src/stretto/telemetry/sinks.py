"""Where events go: JSON lines (the truth), plain lines for a log, several sinks at once."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

from stretto.errors import StrettoError
from stretto.telemetry.events import Event, RunStarted, from_record, to_record
from stretto.telemetry.wording import line


class Sink(Protocol):
    """Something that takes events in the order in which they happen."""

    def __call__(self, event: Event) -> None:
        """Take ``event``; called between steps, so it should be quick."""
        ...

    def close(self) -> None:
        """Let go of files and terminals; called once at the end, also after a failure."""
        ...


@dataclass(frozen=True, slots=True)
class Stamped:
    """An event as it was kept: with the wall-clock time of its keeping."""

    time: datetime
    event: Event


def _utc_now() -> datetime:
    return datetime.now(UTC)


class JsonLines:
    """The truth about a run: one JSON object a line, each line on its way before the call ends.

    Each line leaves this process when it is written, so that a kill loses at most the line being
    written. Appending to a file that a kill left with half a line takes that half away first.
    """

    def __init__(
        self, path: Path, append: bool, *, clock: Callable[[], datetime] = _utc_now
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if append:
            _end_with_a_whole_line(path)
        self._file = path.open("a" if append else "w", encoding="utf-8")
        self._clock = clock

    def __call__(self, event: Event) -> None:
        """Write ``event`` and hand it to the operating system."""
        record = to_record(event, time=self._clock().isoformat(timespec="microseconds"))
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class PlainLines:
    """One line of text per event, for logs and pipes; nothing in it can steer a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._steps = 0

    def __call__(self, event: Event) -> None:
        """Write the line of ``event``; a letter the stream cannot carry is written as its code."""
        if isinstance(event, RunStarted):
            self._steps = event.steps
        text = line(event, steps=self._steps)
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
        with ExitStack() as closing:  # one sink that fails to close does not keep the others open
            for sink in self._sinks:
                closing.callback(sink.close)


def fan_out(sinks: Iterable[Sink]) -> Sink:
    """Return one sink that passes every event to each of ``sinks``, in their order."""
    return _FanOut(tuple(sinks))


def read_events(path: Path) -> list[Event]:
    """Return the events of a JSON lines file, without their times."""
    return [stamped.event for stamped in read_stamped(path)]


def read_stamped(path: Path) -> list[Stamped]:
    """Return the events of a JSON lines file with their times.

    A last line that ends without a line break is what a kill leaves: it is left out unless it is
    whole. Anything else that cannot be read is an error that names its line.
    """
    *whole, torn = path.read_bytes().split(b"\n")
    if _as_object(torn) is not None:
        whole.append(torn)
    return [_stamped(path, number, text) for number, text in enumerate(whole, start=1)]


def _stamped(path: Path, number: int, text: bytes) -> Stamped:
    record = _as_object(text)
    if record is None:
        raise StrettoError(f"{path}, line {number}: expected a JSON object, got {text[:60]!r}")
    try:
        return Stamped(datetime.fromisoformat(str(record.get("time"))), from_record(record))
    except (StrettoError, ValueError) as wrong:
        raise StrettoError(f"{path}, line {number}: {wrong}") from None


def _as_object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _end_with_a_whole_line(path: Path) -> None:
    if not path.exists():
        return
    written = path.read_bytes()
    whole, newline, torn = written.rpartition(b"\n")
    if not torn:
        return
    if _as_object(torn) is not None:  # only the line break is missing
        written += b"\n"
    else:
        written = whole + newline
    aside = path.with_name(f".{path.name}.aside")
    aside.write_bytes(written)
    aside.replace(path)
