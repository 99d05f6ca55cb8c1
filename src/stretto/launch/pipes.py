"""What workers say, read from pipes: every byte into their logs, lines onto the screen, folded.

Note "who may keep us waiting": nobody. Pipes are read only when something is there, a worker's
whole rest is read once its end is seen, and a process it left behind may hold the other end of its
pipe for as long as it likes: the end of a pipe is never waited for.
"""

import math
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from stretto.launch.screen import Folding

LONGEST_LINE = 1 << 16
"""A line that grows beyond this many bytes is taken as one, so that memory stays bounded."""

_READ_BYTES = 1 << 20
"""More than a pipe holds: one read empties it."""


@dataclass(frozen=True, slots=True)
class Screen:
    """Where people look: ours to write to, line by line."""

    stdout: TextIO
    stderr: TextIO
    rows_below: int = 0
    """Rows left free below each of our words, for a picture there that erases as many."""


class Output:
    """The words of all workers; ``logs`` tells where each rank's go, None leaves them to it."""

    def __init__(
        self,
        logs: Mapping[int, Path | None],
        screen: Screen | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logs = logs
        self._screen = screen
        self._clock = clock
        self._folding = Folding({rank: str(log) for rank, log in logs.items()})
        self._pipes: dict[int, _Pipe] = {}
        self._files: list[_Log] = []
        self._lost: list[TextIO] = []

    @contextmanager
    def connected(self, rank: int) -> Iterator[tuple[int | None, int | None]]:
        """Yield what a worker's stdout and stderr are to be while it is started.

        Without a screen nobody reads along, and it writes to its log itself. Of rank 0, whose
        output is the run's, both streams stay what they are.
        """
        log = self._logs[rank]
        if log is None:
            yield None, None
        elif self._screen is None:
            with log.open("ab") as file:
                yield file.fileno(), subprocess.STDOUT
        else:
            both = [self._screen.stdout, self._screen.stderr]
            self._files.append(_Log(log))
            ends = self._open(rank, self._files[-1], both if rank == 0 else both[1:])
            try:
                yield ends[0], ends[-1]
            finally:
                for end in ends:
                    os.close(end)

    @property
    def descriptors(self) -> Sequence[int]:
        """Return what to wait for: readable means that somebody said something."""
        return list(self._pipes)

    def wait_s(self) -> float:
        """Return how long `read` may wait with nothing to read; infinity if for ever."""
        return max(0.0, self._folding.next_s() - self._clock())

    def read(self, ready: Iterable[int]) -> None:
        """Take what is there to be read, and show what is due."""
        for fd in ready:
            self._read(fd)
        if self._screen is not None:
            self._show(self._screen.stderr, self._folding.due(self._clock()))

    def hear_out(self, rank: int) -> None:
        """Take the last words of a worker that has ended."""
        for fd, pipe in list(self._pipes.items()):
            if pipe.rank == rank:
                self._read(fd)
                self._take(pipe, pipe.rest())

    def close(self) -> None:
        """Take and show all that is left, of whomever."""
        for rank in self._logs:
            self.hear_out(rank)
        for fd in self.descriptors:
            self._close(fd)
        for file in self._files:
            file.close()
        if self._screen is not None:
            self._show(self._screen.stderr, self._folding.due(math.inf))

    def _open(self, rank: int, log: "_Log", streams: Sequence[TextIO]) -> list[int]:
        """Make a pipe for each stream; return the ends to write to."""
        ends: list[int] = []
        for stream in streams:
            read_fd, write_fd = os.pipe()
            os.set_blocking(read_fd, False)
            self._pipes[read_fd] = _Pipe(rank, stream, log)
            ends.append(write_fd)
        return ends

    def _read(self, fd: int) -> None:
        pipe = self._pipes[fd]
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if wrong := pipe.log.keep(data):
            self._show(pipe.stream, [f"{wrong}: what rank {pipe.rank} says is shown only"])
        self._take(pipe, pipe.lines(data) if data else pipe.rest())
        if not data:
            self._close(fd)

    def _close(self, fd: int) -> None:
        self._pipes.pop(fd)
        os.close(fd)

    def _take(self, pipe: "_Pipe", lines: Sequence[str]) -> None:
        now_s = self._clock()
        fed = [self._folding.feed(pipe.rank, line, now_s) for line in lines]
        self._show(pipe.stream, [line for shown in fed for line in shown])

    def _show(self, stream: TextIO, lines: Sequence[str]) -> None:
        if not lines or self._screen is None or stream in self._lost:
            return
        text = "".join(f"{line}\n" for line in lines)
        if self._screen.rows_below:
            text = f"\n{text}" + "\n" * self._screen.rows_below
        encoding = stream.encoding or "utf-8"
        try:
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except OSError:
            # A terminal that hung up, a reader that left: no reason to end a run that has its logs.
            self._lost.append(stream)


class _Log:
    """A file that gets every byte at once, for as long as it takes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def keep(self, data: bytes) -> str:
        """Write; return what is wrong when the file takes no more, and leave it from then on."""
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
    """One stream of one rank, cut into lines."""

    rank: int
    stream: TextIO
    log: _Log
    partial: bytes = b""

    def lines(self, data: bytes) -> list[str]:
        """Return the lines that ``data`` completes."""
        *whole, self.partial = (self.partial + data).split(b"\n")
        if len(self.partial) > LONGEST_LINE:
            whole.append(self.partial)
            self.partial = b""
        return [line.decode(errors="replace") for line in whole]

    def rest(self) -> list[str]:
        """Return the line without an end, if there is one."""
        rest, self.partial = self.partial, b""
        return [rest.decode(errors="replace")] if rest else []
