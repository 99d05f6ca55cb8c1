"""The steps of a run with their samples, loaded ahead; it can be sent back to an earlier step."""

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from stretto.data.loader import LoadedShare, Prefetch
from stretto.train.parts import Parts
from stretto.train.step import shares


class Steps:
    """Iterates over (step, this rank's share of its samples)."""

    def __init__(self, parts: Parts, first_step: int) -> None:
        self._parts = parts
        self._next = first_step
        self._batches: Prefetch | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._batches is not None:
            self._batches.close()

    def __iter__(self) -> Iterator[tuple[int, LoadedShare]]:
        while self._next < self._parts.total_steps:
            first, self._next = self._next, self._parts.total_steps
            with Prefetch(self._parts.source, shares(self._parts, first)) as self._batches:
                for step, batch in enumerate(self._batches, first):
                    yield step, batch
                    if self._next < self._parts.total_steps:  # sent back
                        break

    def go_back(self, step: int) -> None:
        """Let ``step`` be the next one."""
        self._next = step
