"""Whose turn it is: segments are ready as their gradients come, and act in one order."""

from collections.abc import Callable, Sequence

from stretto.comm.channel import Pending
from stretto.errors import StrettoError


class Turns:
    """Counts gradients in; lets each segment start something, and act when that is over.

    A segment starts once it and all before it are complete. How early it acts depends on how long
    that takes; the order in which they start, and act, does not.
    """

    def __init__(
        self, counts: Sequence[int], start: Callable[[int], Pending], act: Callable[[int], None]
    ) -> None:
        self._counts = counts
        self._start, self._act = start, act
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._missing = list(self._counts)
        self.started: list[Pending] = []
        """What segments have started in this step, in their order."""
        self._acted = 0

    def gradient(self, index: int) -> None:
        """Note one more gradient of a segment; called from backward's hooks."""
        self._missing[index] -= 1
        if self._missing[index] < 0:
            raise StrettoError(f"a gradient of segment {index} came after the segment had left")
        self._start_while(lambda: self._missing[len(self.started)] == 0)

    def act(self) -> None:
        """Let those act that need not wait."""
        while self._acted < len(self.started) and _is_over(self.started[self._acted]):
            self._act_next()

    def start_rest(self) -> None:
        """Let the rest start, though some gradients have not come: nobody used their parameters."""
        self._start_while(lambda: True)

    def act_rest(self) -> None:
        """Let the rest act, however long they wait."""
        while self._acted < len(self.started):
            self._act_next()

    def _start_while(self, ready: Callable[[], bool]) -> None:
        while len(self.started) < len(self._missing) and ready():
            self.started.append(self._start(len(self.started)))

    def _act_next(self) -> None:
        self._acted += 1
        self._act(self._acted - 1)


def _is_over(pending: Pending) -> bool:
    return pending.finished_s is not None
