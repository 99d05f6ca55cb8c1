"""Prefetching: a background thread loads the next batches while the current step computes."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch import Tensor

from stretto.data.order import RankSamples
from stretto.data.sample_source import SampleSource
from stretto.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class LoadedSamples:
    """A rank's samples of one step, together with their tensors."""

    local_samples: RankSamples
    inputs: Tensor
    targets: Tensor
    wait_s: float
    """Seconds the consumer waited for this batch; about 0 when it was ready in time."""


class Prefetcher:
    """Loads the batches of ``samples_by_step`` in order, up to ``depth`` of them ahead.

    While an epoch fills the source's cache, no batch of the next epoch is loaded before it is asked
    for. By then every rank has read all of the current epoch, so its decoded samples are in the
    cache.

    The thread is the only worker of an executor. An error in the source is therefore raised by
    ``next`` for the batch it belongs to, and ends the iteration. An error raised by
    ``samples_by_step`` is treated in the same way. Use the prefetcher in a ``with`` block: the
    thread ends with the block, even after an exception.
    """

    def __init__(
        self, source: SampleSource, samples_by_step: Iterable[RankSamples], *, depth: int = 2
    ) -> None:
        if depth < 1:
            raise ConfigError(f"cannot load {depth} batches ahead; depth must be at least 1")
        self._source = source
        self._samples_by_step = iter(samples_by_step)
        self._depth = depth
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stretto-data")
        self._prefetched: deque[Future[_LoadResult]] = deque()
        self._deferred: RankSamples | None = None
        self._epoch: int | None = None
        """The epoch of the batch that was submitted last."""
        self._load_ahead()

    def __iter__(self) -> Iterator[LoadedSamples]:
        return self

    def __next__(self) -> LoadedSamples:
        if self._deferred is not None and not self._prefetched:
            self._load(self._deferred)
        if not self._prefetched:
            self.close()
            raise StopIteration
        wait_began_s = time.perf_counter()
        try:
            loaded = self._prefetched.popleft().result()
        except BaseException:  # also an interrupt while waiting: no thread may outlive it
            self.close()
            raise
        wait_s = time.perf_counter() - wait_began_s
        self._load_ahead()
        return LoadedSamples(*loaded, wait_s)

    def close(self) -> None:
        """Stop loading and join the thread; batches that were loaded ahead are dropped."""
        self._prefetched.clear()
        self._deferred, self._samples_by_step = None, iter(())
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
        """Submit batches until ``depth`` are loaded ahead or the epoch ends."""
        while self._deferred is None and len(self._prefetched) < self._depth:
            try:
                local_samples = next(self._samples_by_step)
            except StopIteration:
                return
            except Exception as failure:  # noqa: BLE001 - raised in place of its batch
                self._samples_by_step = iter(())
                self._prefetched.append(_failed_future(failure))
                return
            if self._epoch in (None, local_samples.epoch) or not self._source.fills_cache:
                self._load(local_samples)
            else:
                self._deferred = local_samples

    def _load(self, local_samples: RankSamples) -> None:
        self._deferred, self._epoch = None, local_samples.epoch
        self._prefetched.append(self._pool.submit(_load, self._source, local_samples))


_LoadResult = tuple[RankSamples, Tensor, Tensor]


def _load(source: SampleSource, local_samples: RankSamples) -> _LoadResult:
    return (local_samples, *source.batch(local_samples.samples, local_samples.epoch))


def _failed_future(failure: Exception) -> "Future[_LoadResult]":
    future: Future[_LoadResult] = Future()
    future.set_exception(failure)
    return future
