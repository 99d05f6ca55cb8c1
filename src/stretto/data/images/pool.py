"""Decoder processes that share out the files of a batch, replaced when they die.

Note "who starts decoders". The parent-death signal comes when the *thread* that started a process
ends, not the process. Batches are asked for from threads that come and go, so one thread of the
pool's own starts all decoders and lives as long as it does. It has the signals of a job blocked,
and children inherit that: none can hit a decoder before it ignores them itself.
"""

import select
import signal
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from stretto.data.images.decoder import BAD, IGNORED_SIGNALS, PIXELS, READY
from stretto.data.images.form import Form
from stretto.data.images.process import Decoder
from stretto.errors import StrettoError

_AHEAD = 4
"""Files given to a decoder at once: it never waits for us, and few are left to the slowest."""
_SILENCE_S = 60.0
"""A decoder that says nothing for so long hangs, as on a file system that is gone."""
_FAILED_STARTS = 3
"""Decoders that may end before they are ready, in one batch, until we give up."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there are no pixels of a file."""

    reason: str
    """In one line."""
    is_lasting: bool
    """Whether the bytes prove it; what the system did, or a dead decoder, may pass."""


class Pool:
    """Up to ``limit`` decoder processes; each is started when there is work for it."""

    def __init__(self, limit: int, *, form: Form, max_pixels: int) -> None:
        self._limit = limit
        self._settings = (form, max_pixels)
        self._decoders: list[Decoder] = []
        self._spawner = ThreadPoolExecutor(1, "stretto-decoders", initializer=_block_signals)

    @property
    def pids(self) -> list[int]:
        """The processes that are there now."""
        return [decoder.pid for decoder in self._decoders]

    def prove(self) -> None:
        """Start one decoder and wait for an answer, so that a broken installation shows now."""
        self.decode([b""])  # no file, which is an answer like any other

    def decode(self, paths: Sequence[bytes]) -> list[bytes | Failure]:
        """Return, for each path, its pixels, or why there are none.

        Raises:
            StrettoError: Decoders cannot be started here.
        """
        work = _Work(paths)
        try:
            for decoder in [d for d in self._decoders if not d.is_alive()]:
                self._bury(decoder)
            while work.unanswered:
                self._hand_out(work)
                if not (speaking := self._wait()):
                    self._dismiss_silent(work)
                for decoder in speaking:
                    self._listen(decoder, work)
        except BaseException:  # also an interrupt: replies still to come would be taken for others
            self._end_all()
            raise
        return work.answers

    def close(self) -> None:
        """End all decoders; the pool is of no use afterwards."""
        self._end_all()
        self._spawner.shutdown()

    def _hand_out(self, work: "_Work") -> None:
        """Give waiting files to those who have least to do, after hiring who is missing."""
        for _ in range(min(self._limit, work.unanswered) - len(self._decoders)):
            self._decoders.append(self._spawner.submit(Decoder, *self._settings).result())
        while work.waiting:
            idlest = min(self._decoders, key=lambda decoder: len(decoder.asked))
            if len(idlest.asked) >= _AHEAD:
                return
            ticket = work.waiting.popleft()
            idlest.ask(ticket, work.paths[ticket])

    def _wait(self) -> list[Decoder]:
        """Return the decoders that have something for us; none after a long silence."""
        poller = select.poll()
        owners = {fd: decoder for decoder in self._decoders for fd in decoder.watch(poller)}
        return list(dict.fromkeys(owners[fd] for fd, _ in poller.poll(_SILENCE_S * 1000)))

    def _dismiss_silent(self, work: "_Work") -> None:
        for decoder in [d for d in self._decoders if d.asked]:
            self._bury(decoder)
            work.give_up_on(decoder, how=f"no answer for {_SILENCE_S:.0f} s")

    def _listen(self, decoder: Decoder, work: "_Work") -> None:
        for status, content in decoder.receive():
            if status == READY:
                decoder.is_ready = True
            elif not decoder.is_ready:
                raise StrettoError(
                    f"a decoder process of data.kind = 'images' cannot work: {content.decode()}; "
                    'check the installation of pillow (pip install "stretto[vision]")'
                )
            else:
                work.answer(decoder.asked.popleft(), _meaning(status, content))
        if decoder.has_ended:
            work.give_up_on(decoder, how=self._bury(decoder))

    def _bury(self, decoder: Decoder) -> str:
        self._decoders.remove(decoder)
        return decoder.end()

    def _end_all(self) -> None:
        for decoder in tuple(self._decoders):
            self._bury(decoder)


class _Work:
    """The files of one batch: which wait, which are answered, which have killed a decoder."""

    def __init__(self, paths: Sequence[bytes]) -> None:
        self.paths = paths
        self.answers: list[bytes | Failure] = [b""] * len(paths)
        self.unanswered = len(paths)
        self.waiting = deque(range(len(paths)))
        self._deaths: Counter[int] = Counter()
        self._failed_starts = 0

    def answer(self, ticket: int, content: bytes | Failure) -> None:
        self.answers[ticket] = content
        self.unanswered -= 1

    def give_up_on(self, decoder: Decoder, *, how: str) -> None:
        """Let others do what ``decoder`` was asked; blame the file that it was busy with."""
        if not decoder.is_ready:
            self._failed_starts += 1
            if self._failed_starts == _FAILED_STARTS:
                raise StrettoError(
                    f"decoder processes cannot be started: {_FAILED_STARTS} ended before they "
                    f"were ready, the last with {how}; lower data.decoders or free memory here"
                )
        elif decoder.asked:
            suspect = decoder.asked[0]
            self._deaths[suspect] += 1
            if self._deaths[suspect] == 2:  # once may be bad luck
                decoder.asked.popleft()
                # Memory may have run out, or a file system gone: no proof against the bytes.
                reason = f"killed the decoder twice ({how})"
                self.answer(suspect, Failure(reason, is_lasting=False))
        self.waiting.extendleft(reversed(decoder.asked))


def _meaning(status: int, content: bytes) -> bytes | Failure:
    if status == PIXELS:
        return content
    return Failure(content.decode(), is_lasting=status == BAD)


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
