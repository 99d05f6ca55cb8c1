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

    While a pass fills the source's cache, nothing of the next pass is loaded before it is asked
    for: by then all ranks have read all of this one, and what they decoded is in the cache.

    The thread is one worker of an executor, so an error in the source comes out of ``next``, at
    the share it belongs to, and ends the iteration; so does an error of the iterator of shares.
    Use it in a ``with`` block: the thread ends with the block, however the block ends.
    """

    def __init__(self, source: Source, shares: Iterable[Share], *, depth: int = 2) -> None:
        if depth < 1:
            raise ConfigError(f"cannot load {depth} shares ahead; depth must be at least 1")
        self._source = source
        self._shares = iter(shares)
        self._depth = depth
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stretto-data")
        self._ahead: deque[Future[_Loaded]] = deque()
        self._kept: Share | None = None
        self._epoch: int | None = None
        """Of the share that was given to the thread last."""
        self._load_ahead()

    def __iter__(self) -> Iterator[LoadedShare]:
        return self

    def __next__(self) -> LoadedShare:
        if self._kept is not None and not self._ahead:
            self._load(self._kept)
        if not self._ahead:
            self.close()
            raise StopIteration
        asked_s = time.perf_counter()
        try:
            loaded = self._ahead.popleft().result()
        except BaseException:  # also an interrupt while waiting: no thread may outlive it
            self.close()
            raise
        wait_s = time.perf_counter() - asked_s
        self._load_ahead()
        return LoadedShare(*loaded, wait_s)

    def close(self) -> None:
        """Stop loading and join the thread; what was loaded ahead is dropped."""
        self._ahead.clear()
        self._kept, self._shares = None, iter(())
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

    def _load_ahead(self) -> None:
        """Give the thread work up to ``depth``, or to the end of the pass."""
        while self._kept is None and len(self._ahead) < self._depth:
            try:
                share = next(self._shares)
            except StopIteration:
                return
            except Exception as wrong:  # noqa: BLE001 - comes out where its share would have
                self._shares = iter(())
                self._ahead.append(_failed(wrong))
                return
            if self._epoch in (None, share.epoch) or not self._source.fills_cache:
                self._load(share)
            else:
                self._kept = share

    def _load(self, share: Share) -> None:
        self._kept, self._epoch = None, share.epoch
        self._ahead.append(self._pool.submit(_load, self._source, share))


_Loaded = tuple[Share, Tensor, Tensor]


def _load(source: Source, share: Share) -> _Loaded:
    return (share, *source.batch(share.samples, share.epoch))


def _failed(wrong: Exception) -> "Future[_Loaded]":
    future: Future[_Loaded] = Future()
    future.set_exception(wrong)
    return future
