"""What messages cost here: time on the way, and work for the cores, measured with real messages.

All ranks call these together. One pair of ranks shows how long a message takes; all pairs of a host
at once show what it costs the cores, by the processes' own count of core-seconds.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from stretto.cluster.world import Mesh
from stretto.comm.channel import Channel, Parcel
from stretto.comm.small import add_up_, gather_text, meet_all

_TINY = 8
_LARGE = 8_000_000
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one kind of message costs."""

    latency_s: float
    """An exchange of a few bytes, start to end."""
    bytes_per_s: float
    """One pair of ranks, both directions at once: bytes of one direction."""
    core_s_per_byte: float
    core_s_per_message: float
    buffered_bytes: float
    """The end of a message that its sender need not wait for."""
    queued_bytes: float
    """What a message under way has standing before a word that leaves the same host; 0 inside."""


@dataclass(frozen=True, slots=True)
class Links:
    """What was measured: between hosts and inside one, where there are such ranks."""

    between: Cost | None
    inside: Cost | None
    core_s_per_byte_added: float
    native_s: float
    """The back end's own all-reduce of a few bytes."""
    machines: int
    """How many there really are: in a lab all hosts are one."""
    cores: int
    """Of one machine."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What happened while something was timed: seconds of each rank, core-seconds of all."""

    of_ranks_s: tuple[float, ...]
    core_s: float

    @property
    def seconds(self) -> float:
        """Return the time of the slowest."""
        return max(self.of_ranks_s)


def measure_links(channel: Channel, say: Callable[[str], None], device: str = "cpu") -> Links:
    """Measure everything with tensors on ``device``; takes some ten seconds."""
    mesh = channel.mesh
    bench = _Bench(channel, device)
    machines = _machines(channel)
    between = inside = None
    if mesh.hosts > 1:
        say("messages between two hosts")
        between = bench.cost_between(0, mesh.on_host(1).start)
    if max(mesh.ranks_per_host) > 1:
        say("messages inside a host")
        inside = bench.cost(_neighbours(mesh))
    say("additions, and the back end's own sum")
    return Links(
        between,
        inside,
        bench.addition(),
        bench.native(),
        len(set(machines)),
        psutil.cpu_count() or 1,
    )


def _neighbours(mesh: Mesh) -> dict[int, int]:
    """Pair up the ranks of each host; an odd one out stays alone."""
    pairs: dict[int, int] = {}
    for host in range(mesh.hosts):
        local = list(mesh.on_host(host))
        for first, second in zip(local[::2], local[1::2], strict=False):
            pairs |= {first: second, second: first}
    return pairs


class _Bench:
    """Where things are timed: a channel, and the kind of memory that tensors lie in."""

    def __init__(self, channel: Channel, device: str) -> None:
        self._channel = channel
        self._device = device
        self._finish: Callable[[], None] = (
            torch.cuda.synchronize if device == "cuda" else lambda: None
        )

    def cost(self, pairs: Mapping[int, int]) -> Cost:
        """Time ``pairs`` of ranks that exchange tiny and large messages; the first pair alone."""
        first = next(iter(pairs))
        alone = {first: pairs[first], pairs[first]: first}
        tiny = [self._exchange(alone, _TINY, 100) for _ in range(10)]
        large = [self._exchange(alone, _LARGE, 1) for _ in range(5)]
        busy = self._exchange(pairs, _LARGE, 6)
        bytes_per_s = _LARGE / statistics.median(work.seconds for work in large)
        return Cost(
            # The quickest: whatever disturbs a message makes it longer.
            latency_s=min(work.seconds for work in tiny) / 100,
            bytes_per_s=bytes_per_s,
            core_s_per_byte=busy.core_s / (len(pairs) * _LARGE * 6),
            core_s_per_message=min(work.core_s for work in tiny) / (2 * 100),
            buffered_bytes=bytes_per_s * self._ahead_s(first, pairs[first]),
            queued_bytes=0.0,
        )

    def cost_between(self, one: int, other: int) -> Cost:
        """Return the same for two ranks of different hosts, and what their link's queue holds."""
        cost = self.cost({one: other, other: one})
        line_s = self._line_s(one, other, _LARGE / cost.bytes_per_s)
        return replace(cost, queued_bytes=cost.bytes_per_s * line_s)

    def _line_s(self, source: int, target: int, large_s: float) -> float:
        """Return how much longer a word takes while its host sends something large elsewhere.

        The word is a receiver's that it is ready: what it waits for is on its way at once then.
        """
        if self._device == "cuda":  # no word travels: both ends are in one call
            return 0.0
        self._channel.reserve(2)
        idle_s = self._word_s(source, target)
        large = torch.zeros(_LARGE, dtype=torch.uint8)
        loaded = []
        for _ in range(3):
            meet_all(self._channel)
            with ThreadPoolExecutor(1) as pool:
                bulk = pool.submit(self._send_some, large, source, target)
                time.sleep(large_s / 2)
                loaded.append(self._word_s(source, target))
                bulk.result()
        return max(0.0, statistics.median(loaded) - idle_s)

    def _send_some(self, large: torch.Tensor, source: int, target: int) -> None:
        sends = [Parcel(target, large, 1)] if self._channel.rank == source else []
        receives = [Parcel(source, large, 1)] if self._channel.rank == target else []
        for _ in range(3):
            self._channel.exchange(sends, receives)

    def _word_s(self, source: int, target: int) -> float:
        """Return how long it takes to be sent a few bytes; the rank that is knows, and tells."""
        tiny = torch.zeros(_TINY, dtype=torch.uint8)
        sends = [Parcel(source, tiny)] if self._channel.rank == target else []
        receives = [Parcel(target, tiny)] if self._channel.rank == source else []
        times = []
        for _ in range(12):
            start_s = time.perf_counter()
            self._channel.exchange(sends, receives)
            times.append(time.perf_counter() - start_s)
        told = torch.zeros(1, dtype=torch.float64)
        told += statistics.median(times) if self._channel.rank == source else 0.0
        add_up_(told, self._channel)
        return float(told)

    def _ahead_s(self, source: int, target: int) -> float:
        """Return how much earlier a sender is through with a large message than its receiver."""
        tensor = torch.zeros(_LARGE, dtype=torch.uint8, device=self._device)
        sends = [Parcel(target, tensor)] if self._channel.rank == source else []
        receives = [Parcel(source, tensor)] if self._channel.rank == target else []

        def work() -> None:
            self._channel.exchange(sends, receives)
            self._finish()

        ahead = []
        for _ in range(5):
            took_s = self._watched(work).of_ranks_s
            ahead.append(took_s[target] - took_s[source])
        return max(0.0, statistics.median(ahead))

    def addition(self) -> float:
        """Return core-seconds for each byte that is added, every rank adding at once."""
        left, right = (torch.zeros(_LARGE // 4, device=self._device) for _ in range(2))
        times = []
        meet_all(self._channel)
        for _ in range(5):
            start_s = time.thread_time()
            left.add_(right)
            times.append((time.thread_time() - start_s) / _LARGE)
        total = torch.tensor([statistics.median(times)], dtype=torch.float64)
        add_up_(total, self._channel)
        return float(total) / self._channel.size

    def native(self) -> float:
        """Return the seconds of the back end's own sum of a few bytes."""
        tensor = torch.zeros(2, device=self._device)
        times = []
        for _ in range(20):
            meet_all(self._channel)
            start_s = time.perf_counter()
            add_up_(tensor, self._channel)
            self._finish()
            times.append(time.perf_counter() - start_s)
        return statistics.median(times)

    def _exchange(self, pairs: Mapping[int, int], num_bytes: int, times: int) -> _Work:
        """Have every pair exchange ``num_bytes`` so many times, both ways at once."""
        peer = pairs.get(self._channel.rank)
        out, room = (
            torch.zeros(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)
        )

        def work() -> None:
            for _ in range(times if peer is not None else 0):
                assert peer is not None
                self._channel.exchange([Parcel(peer, out)], [Parcel(peer, room)])
                self._finish()

        return self._watched(work)

    def _watched(self, work: Callable[[], None]) -> _Work:
        meet_all(self._channel)
        core_s, start_s = time.process_time(), time.perf_counter()
        work()
        took = torch.zeros(self._channel.size, 2, dtype=torch.float64)
        took[self._channel.rank, 0] = time.perf_counter() - start_s
        took[self._channel.rank, 1] = time.process_time() - core_s
        add_up_(took, self._channel)
        return _Work(tuple(took[:, 0].tolist()), float(took[:, 1].sum()))


def _machines(channel: Channel) -> list[str]:
    return gather_text(_boot_id(), channel)


def _boot_id() -> str:
    """Return what tells machines apart even where namespaces make several hosts of one."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "unknown"
