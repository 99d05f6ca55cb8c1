"""A pool of decoder processes that share the files of a batch and are replaced when they die.

One thread of the pool starts all decoders and lives as long as the pool. This is needed because
Linux sends the parent-death signal when the *thread* that started a process ends, and batches are
requested from threads that come and go. The thread blocks the signals of a job, and its children
inherit that: no signal can reach a decoder before it ignores them itself.

Neither side may block on a pipe. A decoder that waits for its reply to be read reads no requests,
so a parent that waits for it to read one would deadlock with it. Data that does not fit into a pipe
stays in a buffer of the parent, and `select.poll` watches both pipes.
"""

import os
import select
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stretto.data.images.config import Form
from stretto.data.images.decoder import BAD, IGNORED_SIGNALS, PIXELS, READY, REPLY, REQUEST
from stretto.errors import StrettoError

SCRIPT = Path(__file__).with_name("decoder.py")
_READ_BYTES = 1 << 20


class DecoderProcess:
    """A running decoder process and its unanswered requests; no method blocks on a pipe."""

    def __init__(self, form: Form, max_pixels: int) -> None:
        self._process = _start_process(form, max_pixels)
        assert self._process.stdin is not None  # pipes were asked for
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        os.set_blocking(self._requests.fileno(), False)
        os.set_blocking(self._replies.fileno(), False)
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.pending_requests: deque[int] = deque()
        """Unanswered requests, oldest first."""
        self.is_ready = False
        """Whether READY has arrived; set by the reader of the replies."""
        self.has_ended = False

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def send_request(self, request_id: int, path: bytes) -> None:
        """Request the image at ``path``; the reply belongs to ``request_id``."""
        self.pending_requests.append(request_id)
        self._outgoing += REQUEST.pack(len(path)) + path
        self._send()

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Send buffered requests, then yield the status and content of each complete reply."""
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

    def kill(self) -> str:
        """Kill the process if it is alive; return how it ended, such as "exit code 1"."""
        code = self._process.poll()
        self._process.kill()
        self._requests.close()
        self._replies.close()
        with suppress(subprocess.TimeoutExpired):  # it may hang on a dead file system
            self._process.wait(timeout=5)
        if code is None:
            code = self._process.returncode
        return "no exit" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

    def register_with(self, poller: select.poll) -> Sequence[int]:
        """Register this decoder's pipes with ``poller`` and return their descriptors."""
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
            pass  # the pipe is full: the rest is sent later
        except BrokenPipeError:
            self._outgoing.clear()  # the process is dead; `receive` will see its end


def _start_process(form: Form, max_pixels: int) -> "subprocess.Popen[bytes]":
    numbers = [str(int(n)) for n in (form.side, form.is_whole, max_pixels, os.getpid())]
    try:
        # -P: modules in the script's folder must not shadow others of the same name.
        return subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
    except OSError as error:
        raise StrettoError(
            f"cannot start a process to decode images: {error}; "
            "lower data.decoders or free memory and processes on this host"
        ) from error


MAX_PENDING_PER_DECODER = 4
"""Requests per decoder at a time: enough to keep it busy, few enough to balance the load."""
REPLY_TIMEOUT_S = 60.0
"""A decoder that sends nothing for this long hangs, for example on a dead file system."""
_MAX_FAILED_STARTS = 3
"""Decoders that may end before they are ready, within one batch, before an error is raised."""


@dataclass(frozen=True, slots=True)
class DecodeFailure:
    """The reason why a file could not be decoded."""

    reason: str
    """In one line."""
    is_permanent: bool
    """Whether the file itself is bad; failures of the system or of a decoder may not happen
    again.
    """


class DecoderPool:
    """Up to ``limit`` decoder processes, started on demand."""

    def __init__(self, limit: int, *, form: Form, max_pixels: int) -> None:
        self._limit = limit
        self._settings = (form, max_pixels)
        self._decoders: list[DecoderProcess] = []
        self._spawner = ThreadPoolExecutor(1, "stretto-decoders", initializer=_block_signals)

    @property
    def pids(self) -> list[int]:
        """Process ids of the running decoders."""
        return [decoder.pid for decoder in self._decoders]

    def check_startup(self) -> None:
        """Start one decoder and wait for a reply, so that a broken installation is reported now."""
        self.decode([b""])  # not a file: any reply shows that the decoder works

    def decode(self, paths: Sequence[bytes]) -> list[bytes | DecodeFailure]:
        """Return, for each path, its pixels or the reason why there are none.

        Raises:
            StrettoError: Decoders cannot be started or do not work here.
        """
        batch = _DecodeBatch(paths)
        try:
            for decoder in [d for d in self._decoders if not d.is_alive()]:
                self._remove(decoder)
            while batch.num_unanswered:
                self._assign_files(batch)
                if not (readable := self._poll()):
                    self._remove_unresponsive(batch)
                for decoder in readable:
                    self._receive_replies(decoder, batch)
        except BaseException:  # also interrupts: late replies would be matched to later requests
            self._kill_all()
            raise
        return batch.results

    def close(self) -> None:
        """Kill all decoders; the pool cannot be used afterwards."""
        self._kill_all()
        self._spawner.shutdown()

    def _assign_files(self, batch: "_DecodeBatch") -> None:
        """Start missing decoders, then give waiting files to the least loaded ones."""
        for _ in range(min(self._limit, batch.num_unanswered) - len(self._decoders)):
            self._decoders.append(self._spawner.submit(DecoderProcess, *self._settings).result())
        while batch.unassigned:
            least_loaded = min(self._decoders, key=lambda decoder: len(decoder.pending_requests))
            if len(least_loaded.pending_requests) >= MAX_PENDING_PER_DECODER:
                return
            request_id = batch.unassigned.popleft()
            least_loaded.send_request(request_id, batch.paths[request_id])

    def _poll(self) -> list[DecoderProcess]:
        """Return the decoders with something to read; none after `REPLY_TIMEOUT_S`."""
        poller = select.poll()
        owners = {fd: decoder for decoder in self._decoders for fd in decoder.register_with(poller)}
        return list(dict.fromkeys(owners[fd] for fd, _ in poller.poll(REPLY_TIMEOUT_S * 1000)))

    def _remove_unresponsive(self, batch: "_DecodeBatch") -> None:
        for decoder in [d for d in self._decoders if d.pending_requests]:
            self._remove(decoder)
            batch.requeue_from(decoder, cause=f"no answer for {REPLY_TIMEOUT_S:.0f} s")

    def _receive_replies(self, decoder: DecoderProcess, batch: "_DecodeBatch") -> None:
        for status, content in decoder.receive():
            if status == READY:
                decoder.is_ready = True
            elif not decoder.is_ready:
                raise StrettoError(
                    f"a decoder process of data.kind = 'images' cannot work: {content.decode()}; "
                    'check the installation of pillow (pip install "stretto[vision]")'
                )
            else:
                batch.set_result(decoder.pending_requests.popleft(), _parse_reply(status, content))
        if decoder.has_ended:
            batch.requeue_from(decoder, cause=self._remove(decoder))

    def _remove(self, decoder: DecoderProcess) -> str:
        self._decoders.remove(decoder)
        return decoder.kill()

    def _kill_all(self) -> None:
        for decoder in tuple(self._decoders):
            self._remove(decoder)


class _DecodeBatch:
    """State of one batch: unassigned files, results, and the decoders that each file has killed."""

    def __init__(self, paths: Sequence[bytes]) -> None:
        self.paths = paths
        self.results: list[bytes | DecodeFailure] = [b""] * len(paths)
        self.num_unanswered = len(paths)
        self.unassigned = deque(range(len(paths)))
        self._deaths_by_file: Counter[int] = Counter()
        self._failed_starts = 0

    def set_result(self, request_id: int, content: bytes | DecodeFailure) -> None:
        self.results[request_id] = content
        self.num_unanswered -= 1

    def requeue_from(self, decoder: DecoderProcess, *, cause: str) -> None:
        """Requeue the requests of a dead ``decoder``; blame the file it was decoding."""
        if not decoder.is_ready:
            self._failed_starts += 1
            if self._failed_starts == _MAX_FAILED_STARTS:
                raise StrettoError(
                    f"decoder processes cannot be started: {_MAX_FAILED_STARTS} ended before they "
                    f"were ready, the last with {cause}; lower data.decoders or free memory here"
                )
        elif decoder.pending_requests:
            suspect = decoder.pending_requests[0]
            self._deaths_by_file[suspect] += 1
            if self._deaths_by_file[suspect] == 2:  # the first death may be a coincidence
                decoder.pending_requests.popleft()
                # Not permanent: the cause may be lack of memory or a dead file system.
                reason = f"killed the decoder twice ({cause})"
                self.set_result(suspect, DecodeFailure(reason, is_permanent=False))
        self.unassigned.extendleft(reversed(decoder.pending_requests))


def _parse_reply(status: int, content: bytes) -> bytes | DecodeFailure:
    if status == PIXELS:
        return content
    return DecodeFailure(content.decode(), is_permanent=status == BAD)


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
