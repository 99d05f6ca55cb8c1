"""Transports inside one process: ranks as threads, an emulated slow link, a message recorder.

Tests, demonstrations and notebooks run ranks as threads (`run_threads`). `EmulatedLink` sleeps as
long as a slow network would take, so that one machine can show overlap. `RecordingTransport` lists
every message that a rank sends. Both wrap any transport.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from stretto.cluster.world import Mesh
from stretto.comm.transport import P2POp, Transport, Work
from stretto.errors import TransportError

T = TypeVar("T")


class _PendingSum:
    """One all-reduce that collects the tensors of all ranks."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.total: Tensor | None = None
        self.finished_s: float | None = None

    def complete(self) -> None:
        """Add up the tensors; called once all ranks have given theirs."""
        self.total = _sum_in_rank_order(self.tensors)
        self.finished_s = time.monotonic()


class _SharedState:
    """State that the threads share: mailboxes and pending sums, behind one lock."""

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        self.mesh = mesh
        self.size = mesh.size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.mailboxes: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self.pending_sums: dict[int, _PendingSum] = defaultdict(_PendingSum)
        self.failure_reason: str | None = None

    def wait_for(
        self, ready: Callable[[], Any], description: str, *, without_timeout: bool = False
    ) -> None:
        """Wait until ``ready()`` is true; the caller holds the lock.

        Raises:
            TransportError: A rank failed, or the time-out passed. It begins with ``description``.
        """
        limit_s = None if without_timeout else self.timeout_s
        done = self.changed.wait_for(lambda: self.failure_reason or ready(), limit_s)
        if self.failure_reason:
            raise TransportError(f"{description}: {self.failure_reason}")
        if not done:
            raise TransportError(f"{description}: no answer within {self.timeout_s:g} s")

    def deliver(self, p2p_op: P2POp, target: int, *, without_timeout: bool = False) -> None:
        """Copy the next message from ``p2p_op.peer`` to rank ``target``; the caller holds the lock.

        Raises:
            TransportError: The message has another shape or type than the buffer.
        """
        source, tensor, lane = p2p_op
        mailbox = self.mailboxes[source, target, lane]
        self.wait_for(
            lambda: mailbox,
            f"rank {target} waits for rank {source}",
            without_timeout=without_timeout,
        )
        message = mailbox.popleft()
        if message.shape != tensor.shape or message.dtype != tensor.dtype:
            raise TransportError(
                f"rank {target} expects {tuple(tensor.shape)} {tensor.dtype} from "
                f"rank {source}, which sent {tuple(message.shape)} {message.dtype}"
            )
        tensor.copy_(message)


class ThreadTransport:
    """One thread's end of a group of threads; created by `thread_transports`."""

    def __init__(self, shared: _SharedState, rank: int) -> None:
        self._shared = shared
        self._rank = rank
        self._num_sums = 0

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._shared.size

    @property
    def mesh(self) -> Mesh:
        """The pretended hosts and the ranks on each."""
        return self._shared.mesh

    def reserve(self, lanes: int) -> None:
        """Do nothing: mailboxes are created when needed."""

    def exchange(self, sends: Sequence[P2POp], receives: Sequence[P2POp]) -> None:
        """Send copies of the tensors, then wait for every receive."""
        shared = self._shared
        with shared.changed:
            for peer, tensor, lane in sends:
                shared.mailboxes[self._rank, peer, lane].append(tensor.clone())
            shared.changed.notify_all()
            for p2p_op in receives:
                shared.deliver(p2p_op, self._rank)

    def receive(self, p2p_op: P2POp) -> None:
        """Receive without a time-out; a rank that fails ends the wait."""
        with self._shared.changed:
            self._shared.deliver(p2p_op, self._rank, without_timeout=True)

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """Give this rank's tensor; the last rank adds up all, and `wait` copies the sum."""
        shared, index = self._shared, self._num_sums
        self._num_sums += 1
        with shared.changed:
            pending_sum = shared.pending_sums[index]
            pending_sum.tensors[self._rank] = tensor
            if len(pending_sum.tensors) == shared.size:
                pending_sum.complete()
                del shared.pending_sums[index]
                shared.changed.notify_all()
        return _SumWork(shared, pending_sum, tensor, f"rank {self._rank} waits for sum {index}")

    def watch_for_timeout(self, description: str, is_completed: Callable[[], bool]) -> None:
        """Do nothing: the host waits for everything, and gets the error itself."""

    def close(self) -> None:
        """Leave the group; there is nothing to release."""

    def fail(self, reason: str) -> None:
        """Make every wait of every rank raise `TransportError` with ``reason``."""
        with self._shared.changed:
            self._shared.failure_reason = self._shared.failure_reason or reason
            self._shared.changed.notify_all()


class _SumWork:
    """One rank's handle of a pending sum."""

    def __init__(
        self, shared: _SharedState, pending_sum: _PendingSum, tensor: Tensor, description: str
    ) -> None:
        self._shared = shared
        self._pending_sum = pending_sum
        self._tensor = tensor
        self._description = description
        self._is_copied = False

    @property
    def finished_s(self) -> float | None:
        """Monotonic time at which the last rank gave its tensor; None before that."""
        return self._pending_sum.finished_s

    def wait(self) -> None:
        """Return when the tensor holds the sum."""
        with self._shared.changed:
            self._shared.wait_for(lambda: self._pending_sum.total is not None, self._description)
            if not self._is_copied and self._pending_sum.total is not None:
                self._tensor.copy_(self._pending_sum.total)
            self._is_copied = True


def thread_transports(ranks: int | Mesh, timeout_s: float = 60.0) -> list[ThreadTransport]:
    """Return the connected ends of a new group of threads.

    Args:
        ranks: Number of ranks on one pretended host, or a mesh of pretended hosts.
        timeout_s: Seconds that a rank waits for another.
    """
    mesh = Mesh((ranks,)) if isinstance(ranks, int) else ranks
    shared = _SharedState(mesh, timeout_s)
    return [ThreadTransport(shared, rank) for rank in range(mesh.size)]


def run_threads(
    ranks: int | Mesh, rank_main: Callable[[ThreadTransport], T], timeout_s: float = 60.0
) -> list[T]:
    """Run ``rank_main(transport)`` in one thread for each rank; return the results in rank order.

    The first failure ends the waits of the other ranks and is raised here.
    """
    transports = thread_transports(ranks, timeout_s)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(transport: ThreadTransport) -> None:
        try:
            results[transport.rank] = rank_main(transport)
        except BaseException as failure:  # noqa: BLE001 - handed to the caller's thread below
            failures.append(failure)
            transport.fail(f"rank {transport.rank} failed: {failure}")

    threads = [
        threading.Thread(target=run, args=(transport,), daemon=True) for transport in transports
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(len(transports))]


def _sum_in_rank_order(tensors: dict[int, Tensor]) -> Tensor:
    total = tensors[0].clone()
    with torch.no_grad():
        for rank in range(1, len(tensors)):
            total.add_(tensors[rank])
    return total


class EmulatedLink:
    """Wraps a transport and sleeps as a slow link would: latency plus bytes over bandwidth.

    All messages of this rank share one serial link.
    """

    def __init__(self, inner: Transport, *, latency_s: float, bytes_per_s: float) -> None:
        self._inner = inner
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._link_free_s = 0.0
        self._lock = threading.Lock()

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._inner.size

    @property
    def mesh(self) -> Mesh:
        """The hosts of the group and the ranks on each."""
        return self._inner.mesh

    def reserve(self, lanes: int) -> None:
        """Open lanes of the inner transport."""
        self._inner.reserve(lanes)

    def exchange(self, sends: Sequence[P2POp], receives: Sequence[P2POp]) -> None:
        """Exchange, then sleep until the link would have carried the larger direction."""
        sent_bytes = sum(tensor.nbytes for _, tensor, _ in sends)
        received_bytes = sum(tensor.nbytes for _, tensor, _ in receives)
        done_s = self._occupy(len(sends), max(sent_bytes, received_bytes))
        self._inner.exchange(sends, receives)
        _sleep_until(done_s)

    def receive(self, p2p_op: P2POp) -> None:
        """Receive without a delay: the message occupies the sender's link only."""
        self._inner.receive(p2p_op)

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """Start the sum; it is done when a ring all-reduce over this link would be."""
        n = self.size
        done_s = self._occupy(2 * (n - 1), tensor.nbytes * 2 * (n - 1) / n)
        return _DelayedWork(self._inner.start_all_reduce(tensor), done_s)

    def watch_for_timeout(self, description: str, is_completed: Callable[[], bool]) -> None:
        """Pass the work to the inner transport."""
        self._inner.watch_for_timeout(description, is_completed)

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()

    def _occupy(self, messages: int, num_bytes: float) -> float:
        """Reserve the link for a transfer; return the time at which it would end."""
        with self._lock:
            begin_s = max(time.monotonic(), self._link_free_s)
            self._link_free_s = begin_s + messages * self._latency_s + num_bytes / self._bytes_per_s
            return self._link_free_s


class _DelayedWork:
    """A `Work` that is done at ``done_s`` at the earliest."""

    def __init__(self, inner: Work, done_s: float) -> None:
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


@dataclass(frozen=True, slots=True)
class SentMessage:
    """One message of a rank: to ``peer``, or into the back end's own all-reduce (``peer`` -1)."""

    peer: int
    num_bytes: int
    lane: int = 0


class RecordingTransport:
    """Wraps a transport; ``sent`` lists the messages that this rank sent, in order."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.sent: list[SentMessage] = []

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._inner.size

    @property
    def mesh(self) -> Mesh:
        """The hosts of the group and the ranks on each."""
        return self._inner.mesh

    def reserve(self, lanes: int) -> None:
        """Open lanes of the inner transport."""
        self._inner.reserve(lanes)

    def exchange(self, sends: Sequence[P2POp], receives: Sequence[P2POp]) -> None:
        """Record the sends, then exchange."""
        self.sent.extend(SentMessage(peer, tensor.nbytes, lane) for peer, tensor, lane in sends)
        self._inner.exchange(sends, receives)

    def receive(self, p2p_op: P2POp) -> None:
        """Receive; there is nothing to record."""
        self._inner.receive(p2p_op)

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """Record the tensor, then start the sum."""
        self.sent.append(SentMessage(-1, tensor.nbytes))
        return self._inner.start_all_reduce(tensor)

    def watch_for_timeout(self, description: str, is_completed: Callable[[], bool]) -> None:
        """Pass the work to the inner transport."""
        self._inner.watch_for_timeout(description, is_completed)

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()
