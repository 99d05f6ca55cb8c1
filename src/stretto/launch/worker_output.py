"""Output of workers, read from pipes: all bytes go to the logs, folded lines to the screen.

Reading never blocks. Pipes are read only when they have data, and the rest of a worker's output is
read once the worker has ended. The end of a pipe is never waited for, because a process that the
worker left behind may hold its other end for any time.
"""

import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from stretto.telemetry.event_text import ranks_text, strip_unprintable

FOLD_WINDOW_S = 0.5
"""Seconds a line waits for other ranks that print the same."""
REPEAT_WINDOW_S = 10.0
"""Seconds for which a line of rank 0 hides equal lines of others, which may print them later."""
MAX_REMEMBERED_LINES = 1000
FLOOD_S = 5.0
FLOOD_LINES = 100
"""Lines that a rank may show in each FLOOD_S: 20 a second, and a complete traceback."""

_FAILED_FIRST = "rank {} failed first: "
_SECONDARY_FAILURE = re.compile("stretto: " + _FAILED_FIRST.format(r"\d+"))
"""Start of the line of a rank that quotes another rank's failure, which that rank itself prints."""


def secondary_failure_text(rank: int, reason: str) -> str:
    """Return the message of a rank that failed only because ``rank`` did; no screen shows it."""
    return f"{_FAILED_FIRST.format(rank)}{reason}"


@dataclass(slots=True)
class _WaitingLine:
    """A line that waits, with the ranks that printed it and the time of the first."""

    text: str
    since_s: float
    ranks: set[int]
    is_shown: bool = False
    """Rank 0 has printed it meanwhile; the entry now only keeps the order of its ranks' lines."""


@dataclass(slots=True)
class _Flood:
    """Lines of a rank since ``since_s``."""

    since_s: float = -math.inf
    shown: int = 0
    num_suppressed: int = 0


class LineFolder:
    """Merges equal lines of several ranks for a screen; lines of rank 0 pass unchanged.

    Lines and times go in, lines to show come out; the logs keep every byte. A line that several
    ranks print within `FOLD_WINDOW_S` is shown once, as ``[ranks 1-3] text``. Each rank's lines
    stay in order, so that a traceback of three ranks reads as one. Lines that rank 0 has printed
    are not repeated for other ranks, and failures caused by another rank's failure are not shown.
    """

    def __init__(self, logs: Mapping[int, str]) -> None:
        self._logs = logs
        """Log of each rank, for the note that some lines were suppressed."""
        self._waiting: list[_WaitingLine] = []
        self._floods: dict[int, _Flood] = {}
        self._rank0_lines: dict[str, float] = {}
        """Rank 0's lines and the time each was printed last, oldest first."""

    def feed(self, rank: int, line: str, now_s: float) -> list[str]:
        """Add a line; return the lines to show at once, which are rank 0's only."""
        if rank and self._is_suppressed(rank, now_s):
            return []
        text = _visible_text(line)
        if _SECONDARY_FAILURE.match(text):
            return []
        if rank == 0:
            self._remember(text, now_s)
            return [text]
        is_repeat = now_s - self._rank0_lines.get(text, -math.inf) < REPEAT_WINDOW_S
        if text and not is_repeat:
            self._floods[rank].shown += 1
            self._merge(rank, text, now_s)
        return []

    def due(self, now_s: float) -> list[str]:
        """Return the lines to show by ``now_s``; ``math.inf`` returns all waiting lines."""
        for rank, flood in self._floods.items():
            if flood.num_suppressed and now_s >= flood.since_s + FLOOD_S:
                self._report_suppressed(rank, flood, now_s)
        due_indices = [
            i for i, line in enumerate(self._waiting) if line.since_s + FOLD_WINDOW_S <= now_s
        ]
        # Younger lines before a due one are shown with it, which keeps the order without delay.
        num_leaving = max(due_indices, default=-1) + 1
        shown, self._waiting = self._waiting[:num_leaving], self._waiting[num_leaving:]
        return [f"[{ranks_text(line.ranks)}] {line.text}" for line in shown if not line.is_shown]

    def next_due_s(self) -> float:
        """Return the time at which `due` has lines next; infinity if none waits."""
        lines = (line.since_s + FOLD_WINDOW_S for line in self._waiting)
        floods = (
            flood.since_s + FLOOD_S for flood in self._floods.values() if flood.num_suppressed
        )
        return min((*lines, *floods), default=math.inf)

    def _remember(self, text: str, now_s: float) -> None:
        self._rank0_lines.pop(text, None)
        self._rank0_lines[text] = now_s
        if len(self._rank0_lines) > MAX_REMEMBERED_LINES:
            self._rank0_lines.pop(next(iter(self._rank0_lines)))
        for line in self._waiting:
            line.is_shown |= line.text == text

    def _is_suppressed(self, rank: int, now_s: float) -> bool:
        flood = self._floods.setdefault(rank, _Flood())
        if now_s >= flood.since_s + FLOOD_S:
            self._report_suppressed(rank, flood, now_s)
            flood.since_s, flood.shown = now_s, 0
        if flood.shown == FLOOD_LINES:
            flood.num_suppressed += 1
            return True
        return False

    def _report_suppressed(self, rank: int, flood: _Flood, now_s: float) -> None:
        if flood.num_suppressed:
            self._merge(
                rank, f"... {flood.num_suppressed:,} more lines in {self._logs[rank]}", now_s
            )
            flood.num_suppressed = 0

    def _merge(self, rank: int, text: str, now_s: float) -> None:
        """Add the rank to an equal line that waits, or append its line.

        Lines that the rank has printed alone since then move in front of that line, so that the
        rank's own order is kept. Lines that it shares with others cannot move.
        """
        waiting = self._waiting
        shared = (i for i, line in enumerate(waiting) if rank in line.ranks and len(line.ranks) > 1)
        first = max(shared, default=-1) + 1
        same = (i for i in range(first, len(waiting)) if waiting[i].text == text)
        index = next((i for i in same if rank not in waiting[i].ranks), None)
        if index is None:
            waiting.append(_WaitingLine(text, now_s, {rank}))
            return
        joined = waiting[index]
        waiting[index:] = sorted(waiting[index:], key=lambda line: rank not in line.ranks)
        joined.ranks.add(rank)


def _visible_text(line: str) -> str:
    """Return what a terminal would show in the end: progress bars overwrite their lines."""
    return strip_unprintable(line.rstrip("\r").rsplit("\r", 1)[-1].rstrip())


MAX_LINE_BYTES = 1 << 16
"""A longer line is split, so that memory stays bounded."""

_READ_BYTES = 1 << 20
"""More than a pipe holds, so that one read empties it."""


@dataclass(frozen=True, slots=True)
class ConsoleStreams:
    """Our own stdout and stderr, to which workers' lines are written."""

    stdout: TextIO
    stderr: TextIO
    reserved_rows: int = 0
    """Rows left free below our lines for a live display, which erases as many."""


class WorkerOutput:
    """Reads the output of all workers; ``logs`` maps ranks to logs, or None for direct output."""

    def __init__(
        self,
        logs: Mapping[int, Path | None],
        console_streams: ConsoleStreams | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logs = logs
        self._console_streams = console_streams
        self._clock = clock
        self._folding = LineFolder({rank: str(log) for rank, log in logs.items()})
        self._pipes: dict[int, _Pipe] = {}
        self._files: list[_Log] = []
        self._broken_streams: list[TextIO] = []

    @contextmanager
    def redirect_streams(self, rank: int) -> Iterator[tuple[int | None, int | None]]:
        """Yield the stdout and stderr with which the worker is to be started.

        Without a screen the worker writes to its log directly. Rank 0, whose output is the run's,
        keeps two separate streams; other ranks have one.
        """
        log = self._logs[rank]
        if log is None:
            yield None, None
        elif self._console_streams is None:
            with log.open("ab") as file:
                yield file.fileno(), subprocess.STDOUT
        else:
            both = [self._console_streams.stdout, self._console_streams.stderr]
            self._files.append(_Log(log))
            write_ends = self._open(rank, self._files[-1], both if rank == 0 else both[1:])
            try:
                yield write_ends[0], write_ends[-1]
            finally:
                for end in write_ends:
                    os.close(end)

    @property
    def descriptors(self) -> Sequence[int]:
        """The pipes to wait for; a readable one has output or has ended."""
        return list(self._pipes)

    def max_wait_s(self) -> float:
        """Return the time until `read` must be called without output; infinity if no line waits."""
        return max(0.0, self._folding.next_due_s() - self._clock())

    def read(self, ready: Iterable[int]) -> None:
        """Read the pipes that are ``ready``, and show the lines that are due."""
        for fd in ready:
            self._read(fd)
        if self._console_streams is not None:
            self._show(self._console_streams.stderr, self._folding.due(self._clock()))

    def drain(self, rank: int) -> None:
        """Read the last output of a worker that has ended."""
        for fd, pipe in list(self._pipes.items()):
            if pipe.rank == rank:
                self._read(fd)
                self._feed(pipe, pipe.remainder())

    def close(self) -> None:
        """Read and show all output that is left, and close the pipes and logs."""
        for rank in self._logs:
            self.drain(rank)
        for fd in self.descriptors:
            self._close(fd)
        for file in self._files:
            file.close()
        if self._console_streams is not None:
            self._show(self._console_streams.stderr, self._folding.due(math.inf))

    def _open(self, rank: int, log: "_Log", streams: Sequence[TextIO]) -> list[int]:
        """Create a pipe for each stream; return the write ends."""
        write_ends: list[int] = []
        for stream in streams:
            read_fd, write_fd = os.pipe()
            os.set_blocking(read_fd, False)
            self._pipes[read_fd] = _Pipe(rank, stream, log)
            write_ends.append(write_fd)
        return write_ends

    def _read(self, fd: int) -> None:
        pipe = self._pipes[fd]
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if wrong := pipe.log.write(data):
            self._show(pipe.stream, [f"{wrong}: output of rank {pipe.rank} is shown here only"])
        self._feed(pipe, pipe.lines(data) if data else pipe.remainder())
        if not data:
            self._close(fd)

    def _close(self, fd: int) -> None:
        self._pipes.pop(fd)
        os.close(fd)

    def _feed(self, pipe: "_Pipe", lines: Sequence[str]) -> None:
        now_s = self._clock()
        fed = [self._folding.feed(pipe.rank, line, now_s) for line in lines]
        self._show(pipe.stream, [line for shown in fed for line in shown])

    def _show(self, stream: TextIO, lines: Sequence[str]) -> None:
        if not lines or self._console_streams is None or stream in self._broken_streams:
            return
        text = "".join(f"{line}\n" for line in lines)
        if self._console_streams.reserved_rows:
            text = f"\n{text}" + "\n" * self._console_streams.reserved_rows
        encoding = stream.encoding or "utf-8"
        try:
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except OSError:
            # A closed terminal or reader must not end the run; the logs are still written.
            self._broken_streams.append(stream)


class _Log:
    """An unbuffered log file; after a write error it is closed and ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, data: bytes) -> str:
        """Write ``data``; after an error close the file and return a message."""
        try:
            while data and self._fd is not None:
                data = data[os.write(self._fd, data) :]
        except OSError as failure:
            self.close()
            return f"{self._path} cannot be written ({failure.strerror})"
        return ""

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@dataclass(slots=True)
class _Pipe:
    """One output stream of one rank, split into lines."""

    rank: int
    stream: TextIO
    log: _Log
    partial: bytes = b""

    def lines(self, data: bytes) -> list[str]:
        """Return the complete lines after adding ``data``."""
        *whole, self.partial = (self.partial + data).split(b"\n")
        if len(self.partial) > MAX_LINE_BYTES:
            whole.append(self.partial)
            self.partial = b""
        return [line.decode(errors="replace") for line in whole]

    def remainder(self) -> list[str]:
        """Return the last line without a line end, if there is one."""
        remainder, self.partial = self.partial, b""
        return [remainder.decode(errors="replace")] if remainder else []
