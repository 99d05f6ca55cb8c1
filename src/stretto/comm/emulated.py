"""A slow link that needs no network: every message takes latency plus bytes over bandwidth.

The sleeps stand in for a wire, so that overlap can be shown on one machine, in one process.
"""

import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from stretto.cluster.world import Mesh
from stretto.comm.channel import Channel, Parcel, Pending


class EmulatedLink:
    """Wraps any channel; messages of this rank share one serial link."""

    def __init__(self, inner: Channel, *, latency_s: float, bytes_per_s: float) -> None:
        self._inner = inner
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    @property
    def rank(self) -> int:
        """My place in the group."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """Number of members."""
        return self._inner.size

    @property
    def mesh(self) -> Mesh:
        """Which members share a host."""
        return self._inner.mesh

    def reserve(self, lanes: int) -> None:
        """Let the inner channel make ready."""
        self._inner.reserve(lanes)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Exchange, then wait until the link would have carried the larger direction."""
        out = sum(tensor.nbytes for _, tensor, _ in sends)
        back = sum(tensor.nbytes for _, tensor, _ in receives)
        done_s = self._occupy(len(sends), max(out, back))
        self._inner.exchange(sends, receives)
        _sleep_until(done_s)

    def hear(self, parcel: Parcel) -> None:
        """Hear: who sends has the link."""
        self._inner.hear(parcel)

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Begin the sum; it is done when a ring of this size would have carried it."""
        n = self.size
        done_s = self._occupy(2 * (n - 1), tensor.nbytes * 2 * (n - 1) / n)
        return _Delayed(self._inner.start_all_reduce(tensor), done_s)

    def watch(self, what: str, over: Callable[[], bool]) -> None:
        """Let the inner channel look after it."""
        self._inner.watch(what, over)

    def close(self) -> None:
        """Close the inner channel."""
        self._inner.close()

    def _occupy(self, messages: int, num_bytes: float) -> float:
        with self._lock:
            begin_s = max(time.monotonic(), self._free_s)
            self._free_s = begin_s + messages * self._latency_s + num_bytes / self._bytes_per_s
            return self._free_s


class _Delayed:
    def __init__(self, inner: Pending, done_s: float) -> None:
        self._inner = inner
        self._done_s = done_s

    @property
    def finished_s(self) -> float | None:
        return self._done_s if time.monotonic() >= self._done_s else None

    def wait(self) -> None:
        self._inner.wait()
        _sleep_until(self._done_s)


def _sleep_until(done_s: float) -> None:
    time.sleep(max(0.0, done_s - time.monotonic()))
