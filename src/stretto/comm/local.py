"""Ranks as threads of one process: the channel of tests, demonstrations and notebooks."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from stretto.cluster.world import Mesh
from stretto.comm.channel import Parcel, Pending
from stretto.errors import ChannelError

T = TypeVar("T")


class _Table:
    """Where one sum is made."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.total: Tensor | None = None
        self.finished_s: float | None = None

    def close(self) -> None:
        """Add up: all have come."""
        self.total = _sum_in_rank_order(self.tensors)
        self.finished_s = time.monotonic()


class _Hub:
    """What the threads share: letter boxes, and the tables at which sums are made."""

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        self.mesh = mesh
        self.size = mesh.size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.boxes: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self.tables: dict[int, _Table] = defaultdict(_Table)
        self.broken: str | None = None

    def wait_for(self, ready: Callable[[], Any], what: str, *, patient: bool = False) -> None:
        """Wait, the lock held, until ``ready``; end in a named error on a failure or time-out."""
        limit_s = None if patient else self.timeout_s
        done = self.changed.wait_for(lambda: self.broken or ready(), limit_s)
        if self.broken:
            raise ChannelError(f"{what}: {self.broken}")
        if not done:
            raise ChannelError(f"{what}: no answer within {self.timeout_s:g} s")

    def deliver(self, parcel: Parcel, target: int, *, patient: bool = False) -> None:
        """Put the next message of a route where it was wanted, the lock held."""
        source, tensor, lane = parcel
        box = self.boxes[source, target, lane]
        self.wait_for(lambda: box, f"rank {target} waits for rank {source}", patient=patient)
        letter = box.popleft()
        if letter.shape != tensor.shape or letter.dtype != tensor.dtype:
            raise ChannelError(
                f"rank {target} expects {tuple(tensor.shape)} {tensor.dtype} from "
                f"rank {source}, which sent {tuple(letter.shape)} {letter.dtype}"
            )
        tensor.copy_(letter)


class LocalChannel:
    """One thread's end of a group of threads; made by `local_channels`."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self._sums = 0

    @property
    def rank(self) -> int:
        """My place in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of members."""
        return self._hub.size

    @property
    def mesh(self) -> Mesh:
        """Which members play to share a host."""
        return self._hub.mesh

    def reserve(self, lanes: int) -> None:
        """Do nothing: letter boxes are made when needed."""

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Send and receive everything at once."""
        hub = self._hub
        with hub.changed:
            for peer, tensor, lane in sends:
                hub.boxes[self._rank, peer, lane].append(tensor.clone())
            hub.changed.notify_all()
            for parcel in receives:
                hub.deliver(parcel, self._rank)

    def hear(self, parcel: Parcel) -> None:
        """Receive, however long it takes; a rank that fails ends it."""
        with self._hub.changed:
            self._hub.deliver(parcel, self._rank, patient=True)

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Sum in rank order, once, by whoever comes last; each copies when it waits."""
        hub, index = self._hub, self._sums
        self._sums += 1
        with hub.changed:
            table = hub.tables[index]
            table.tensors[self._rank] = tensor
            if len(table.tensors) == hub.size:
                table.close()
                del hub.tables[index]
                hub.changed.notify_all()
        return _Sum(hub, table, tensor, f"rank {self._rank} waits for sum {index}")

    def watch(self, what: str, over: Callable[[], bool]) -> None:
        """Do nothing: whoever waits here is told."""

    def close(self) -> None:
        """Leave the group; threads need nothing more."""

    def fail(self, reason: str) -> None:
        """Wake every waiting member with ``reason``."""
        with self._hub.changed:
            self._hub.broken = self._hub.broken or reason
            self._hub.changed.notify_all()


class _Sum:
    """A sum under way, seen by one rank."""

    def __init__(self, hub: _Hub, table: _Table, tensor: Tensor, what: str) -> None:
        self._hub, self._table, self._tensor, self._what = hub, table, tensor, what
        self._taken = False

    @property
    def finished_s(self) -> float | None:
        """When the last rank came."""
        return self._table.finished_s

    def wait(self) -> None:
        """Return when the sum is there."""
        with self._hub.changed:
            self._hub.wait_for(lambda: self._table.total is not None, self._what)
            if not self._taken and self._table.total is not None:
                self._tensor.copy_(self._table.total)
            self._taken = True


def local_channels(ranks: int | Mesh, timeout_s: float = 60.0) -> list[LocalChannel]:
    """Return the connected ends of a new group of threads, on one host or on a mesh of some."""
    mesh = Mesh((ranks,)) if isinstance(ranks, int) else ranks
    hub = _Hub(mesh, timeout_s)
    return [LocalChannel(hub, rank) for rank in range(mesh.size)]


def run_local(
    ranks: int | Mesh, work: Callable[[LocalChannel], T], timeout_s: float = 60.0
) -> list[T]:
    """Run ``work(channel)`` as every rank, a thread each; return their results in rank order.

    The first failure wakes the others and is raised here.
    """
    channels = local_channels(ranks, timeout_s)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(channel: LocalChannel) -> None:
        try:
            results[channel.rank] = work(channel)
        except BaseException as failure:  # noqa: BLE001 - handed to the caller's thread below
            failures.append(failure)
            channel.fail(f"rank {channel.rank} failed: {failure}")

    threads = [threading.Thread(target=run, args=(channel,), daemon=True) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(len(channels))]


def _sum_in_rank_order(table: dict[int, Tensor]) -> Tensor:
    total = table[0].clone()
    with torch.no_grad():
        for rank in range(1, len(table)):
            total.add_(table[rank])
    return total
