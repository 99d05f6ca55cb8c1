"""Whose turn it is: segments are ready as their gradients come, and act in one order."""

from collections.abc import Callable, Sequence

from stretto.errors import StrettoError


class Turns:
    """Counts gradients in; lets each segment act once it and all before it are complete."""

    def __init__(self, counts: Sequence[int], act: Callable[[int], None]) -> None:
        self._counts = counts
        self._act = act
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._missing = list(self._counts)
        self._next = 0

    def gradient(self, index: int) -> None:
        """Note one more gradient of a segment; called from backward's hooks."""
        self._missing[index] -= 1
        if self._missing[index] < 0:
            raise StrettoError(f"a gradient of segment {index} came after the segment had left")
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._go()

    def finish(self) -> None:
        """Let the rest act, though some gradients have not come: their parameters were not used."""
        while self._next < len(self._missing):
            self._go()

    def _go(self) -> None:
        index = self._next
        self._next += 1
        self._act(index)
