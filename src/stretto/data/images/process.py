"""Our end of one decoder process: start it, ask, listen; nothing here ever blocks.

Note "both pipes full". A decoder that waits until somebody reads its reply reads no request;
whoever then waits until it reads one waits for ever. So neither pipe is waited for alone: what
does not fit stays in a buffer of ours, and `select.poll` watches both.
"""

import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from stretto.data.images.decoder import REPLY, REQUEST
from stretto.data.images.form import Form
from stretto.errors import StrettoError

_SCRIPT = Path(__file__).with_name("decoder.py")
_READ_BYTES = 1 << 20


class Decoder:
    """A running decoder process, and what it has been asked."""

    def __init__(self, form: Form, max_pixels: int) -> None:
        self._process = _start(form, max_pixels)
        assert self._process.stdin is not None  # pipes were asked for
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        os.set_blocking(self._requests.fileno(), False)
        os.set_blocking(self._replies.fileno(), False)
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.asked: deque[int] = deque()
        """What it has not answered yet, in the order of asking."""
        self.is_ready = False
        """Whether it has said that it works; set by whoever reads its replies."""
        self.has_ended = False

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def ask(self, ticket: int, path: bytes) -> None:
        """Request the image at ``path``; the reply belongs to ``ticket``."""
        self.asked.append(ticket)
        self._outgoing += REQUEST.pack(len(path)) + path
        self._send()

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Send what waits, then yield the status and content of each reply that is complete."""
        self._send()
        with suppress(BlockingIOError):
            chunk = os.read(self._replies.fileno(), _READ_BYTES)
            self._incoming += chunk
            self.has_ended = not chunk
        start = 0
        while len(self._incoming) >= start + REPLY.size:
            status, length = REPLY.unpack_from(self._incoming, start)
            content_at = start + REPLY.size
            if len(self._incoming) < content_at + length:
                break
            start = content_at + length
            yield status, bytes(self._incoming[content_at:start])
        del self._incoming[:start]

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    def end(self) -> str:
        """Kill the process if it lives, and return in words how it ended."""
        code = self._process.poll()
        self._process.kill()
        self._requests.close()
        self._replies.close()
        with suppress(subprocess.TimeoutExpired):  # stuck in the kernel, on a dead file system
            self._process.wait(timeout=5)
        if code is None:
            code = self._process.returncode
        return "no exit" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

    def watch(self, poller: select.poll) -> Sequence[int]:
        """Register what this decoder waits for, and return the descriptors."""
        poller.register(self._replies, select.POLLIN)
        if not self._outgoing:
            return (self._replies.fileno(),)
        poller.register(self._requests, select.POLLOUT)
        return (self._replies.fileno(), self._requests.fileno())

    def _send(self) -> None:
        try:
            while self._outgoing:
                sent = os.write(self._requests.fileno(), self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            pass  # the pipe is full: the rest goes when it has room
        except BrokenPipeError:
            self._outgoing.clear()  # it is dead, which the end of its replies will show


def _start(form: Form, max_pixels: int) -> "subprocess.Popen[bytes]":
    numbers = [str(int(n)) for n in (form.side, form.is_whole, max_pixels, os.getpid())]
    try:
        # -P: the modules beside the script must not stand in for others of the same name.
        return subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
    except OSError as wrong:
        raise StrettoError(
            f"cannot start a process to decode images: {wrong}; "
            "lower data.decoders or free memory and processes on this host"
        ) from wrong
