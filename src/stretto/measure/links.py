"""What messages cost here: time on the way, and work for the cores, measured with real messages.

All ranks call these together. One pair of ranks shows how long a message takes; all pairs of a host
at once show what it costs the cores, by the processes' own count of core-seconds.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    """What happened while something was timed: seconds of the slowest, core-seconds of all."""

    seconds: float
    core_s: float


def measure_links(channel: Channel, say: Callable[[str], None], device: str = "cpu") -> Links:
    """Measure everything with tensors on ``device``; takes some ten seconds."""
    mesh = channel.mesh
    bench = _Bench(channel, device)
    machines = _machines(channel)
    between = inside = None
    if mesh.hosts > 1:
        say("messages between two hosts")
        between = bench.cost({0: mesh.on_host(1).start, mesh.on_host(1).start: 0})
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
        return Cost(
            # The quickest: whatever disturbs a message makes it longer.
            latency_s=min(work.seconds for work in tiny) / 100,
            bytes_per_s=_LARGE / statistics.median(work.seconds for work in large),
            core_s_per_byte=busy.core_s / (len(pairs) * _LARGE * 6),
            core_s_per_message=min(work.core_s for work in tiny) / (2 * 100),
        )

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
        return _Work(float(took[:, 0].max()), float(took[:, 1].sum()))


def _machines(channel: Channel) -> list[str]:
    return gather_text(_boot_id(), channel)


def _boot_id() -> str:
    """Return what tells machines apart even where namespaces make several hosts of one."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "unknown"
