"""Looks after what was queued on a GPU: a GPU that waits for a dead peer waits for ever."""

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from stretto.units import format_s

_LOOK_S = 0.2


def leave_process(reason: str) -> None:
    """Say why and end at once: threads that wait for the GPU cannot be woken."""
    sys.stderr.write(f"stretto: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


class Watchman:
    """Gives up, by default the whole process, when something queued does not end in time."""

    def __init__(
        self, rank: int, timeout_s: float, give_up: Callable[[str], None] = leave_process
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._watched: deque[tuple[str, float, Callable[[], bool]]] = deque()
        self._given_up = False
        self.endless = False
        """What is queued will never be over: nobody should wait for it."""
        self._looking = threading.Lock()
        atexit.register(self._at_exit)
        threading.Thread(target=self._look, name="watchman", daemon=True).start()

    def watch(self, what: str, over: Callable[[], bool]) -> None:
        """From now on, ``what`` has the time-out to be ``over``."""
        self._watched.append((what, time.monotonic(), over))

    def _look(self) -> None:
        while not self._given_up:
            time.sleep(_LOOK_S)
            trouble = self._trouble()
            if trouble:
                self._given_up = True
                self._give_up(trouble)

    def _trouble(self) -> str:
        """Forget what is over; return what is wrong with the oldest of the rest, if anything."""
        with self._looking:  # the main thread looks, too, when it ends
            return self._look_at_oldest()

    def _look_at_oldest(self) -> str:
        while self._watched:
            what, since_s, over = self._watched[0]
            try:
                ended = over()
            except RuntimeError as failure:  # the GPU is lost, for whatever is queued on it
                why = next(iter(str(failure).splitlines()), "no reason given")
                return f"rank {self._rank}: {what} failed on the GPU: {why}"
            if not ended:
                late = time.monotonic() - since_s > self._timeout_s
                return (
                    f"rank {self._rank}: {what} is not over after {format_s(self._timeout_s)}: a "
                    "peer hangs, was killed, or does not take part"
                    if late
                    else ""
                )
            self._watched.popleft()
        return ""

    def _at_exit(self) -> None:
        """Name what was under way, where an error of the GPU ended the main thread first."""
        trouble = "" if self._given_up else self._trouble()
        if trouble:
            sys.stderr.write(f"stretto: {trouble}\n")
        if self.endless:
            # The interpreter would now close NCCL's communicators, which wait for the GPU.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
