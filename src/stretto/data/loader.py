"""The next batches, prepared by a background thread while the step computes."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch import Tensor

from stretto.data.order import Share
from stretto.data.source import Source
from stretto.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class LoadedShare:
    """A share together with its tensors."""

    share: Share
    inputs: Tensor
    targets: Tensor
    wait_s: float
    """How long the consumer stood still for it: next to nothing when it was ready in time."""


class Prefetch:
    """Shares in order, up to ``depth`` of them loaded ahead.

    The thread is one worker of an executor, so an error in the source or in the iterator of
    shares comes out of ``next``, at the share it belongs to, and ends the iteration. Use it in
    a ``with`` block: the thread ends with the block, however the block ends.
    """

    def __init__(self, source: Source, shares: Iterable[Share], *, depth: int = 2) -> None:
        if depth < 1:
            raise ConfigError(f"cannot load {depth} shares ahead; depth must be at least 1")
        self._source = source
        self._shares = iter(shares)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stretto-data")
        self._ahead: deque[Future[_Loaded | None]] = deque()
        for _ in range(depth):
            self._load_one_more()

    def __iter__(self) -> Iterator[LoadedShare]:
        return self

    def __next__(self) -> LoadedShare:
        if not self._ahead:
            raise StopIteration
        asked_s = time.perf_counter()
        try:
            loaded = self._ahead.popleft().result()
        except BaseException:  # also an interrupt while waiting: no thread may outlive it
            self.close()
            raise
        wait_s = time.perf_counter() - asked_s
        if loaded is None:
            self.close()
            raise StopIteration
        self._load_one_more()
        return LoadedShare(*loaded, wait_s)

    def close(self) -> None:
        """Stop loading and join the thread; what was loaded ahead is dropped."""
        self._ahead.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _load_one_more(self) -> None:
        self._ahead.append(self._pool.submit(_load_next, self._source, self._shares))


_Loaded = tuple[Share, Tensor, Tensor]


def _load_next(source: Source, shares: Iterator[Share]) -> _Loaded | None:
    """Run in the thread, the only place where ``shares`` is advanced; None at its end."""
    share = next(shares, None)
    return None if share is None else (share, *source.batch(share.samples))
