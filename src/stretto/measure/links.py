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


def measure_links(channel: Channel, say: Callable[[str], None]) -> Links:
    """Measure everything; takes some ten seconds."""
    mesh = channel.mesh
    machines = _machines(channel)
    between = inside = None
    if mesh.hosts > 1:
        say("messages between two hosts")
        between = _cost(channel, {0: mesh.on_host(1).start, mesh.on_host(1).start: 0})
    if max(mesh.ranks_per_host) > 1:
        say("messages inside a host")
        inside = _cost(channel, _neighbours(mesh))
    say("additions, and the back end's own sum")
    return Links(
        between,
        inside,
        _addition(channel),
        _native(channel),
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


def _cost(channel: Channel, pairs: Mapping[int, int]) -> Cost:
    """Time ``pairs`` of ranks that exchange tiny and large messages; the first pair alone first."""
    first = next(iter(pairs))
    alone = {first: pairs[first], pairs[first]: first}
    tiny = _repeat(channel, alone, _TINY, 100)
    many = _repeat(channel, alone, _TINY, 1000)
    large = [_repeat(channel, alone, _LARGE, 1) for _ in range(5)]
    busy = _repeat(channel, pairs, _LARGE, 6)
    return Cost(
        latency_s=min(tiny.seconds / 100, many.seconds / 1000),
        bytes_per_s=_LARGE / statistics.median(work.seconds for work in large),
        core_s_per_byte=busy.core_s / (len(pairs) * _LARGE * 6),
        core_s_per_message=many.core_s / (2 * 1000),
    )


def _repeat(channel: Channel, pairs: Mapping[int, int], num_bytes: int, times: int) -> _Work:
    """Have every pair exchange ``num_bytes`` so many times, both ways at once."""
    peer = pairs.get(channel.rank)
    out = torch.zeros(num_bytes, dtype=torch.uint8)
    room = torch.zeros(num_bytes, dtype=torch.uint8)

    def work() -> None:
        for _ in range(times if peer is not None else 0):
            assert peer is not None
            channel.exchange([Parcel(peer, out)], [Parcel(peer, room)])

    return _watched(channel, work)


def _watched(channel: Channel, work: Callable[[], None]) -> _Work:
    meet_all(channel)
    core_s, start_s = time.process_time(), time.perf_counter()
    work()
    took = torch.zeros(channel.size, 2, dtype=torch.float64)
    took[channel.rank, 0] = time.perf_counter() - start_s
    took[channel.rank, 1] = time.process_time() - core_s
    add_up_(took, channel)
    return _Work(float(took[:, 0].max()), float(took[:, 1].sum()))


def _addition(channel: Channel) -> float:
    """Return core-seconds for each byte that is added, every rank adding at once."""
    left, right = torch.zeros(_LARGE // 4), torch.ones(_LARGE // 4)
    times = []
    meet_all(channel)
    for _ in range(5):
        start_s = time.thread_time()
        left.add_(right)
        times.append((time.thread_time() - start_s) / _LARGE)
    total = torch.tensor([statistics.median(times)], dtype=torch.float64)
    add_up_(total, channel)
    return float(total) / channel.size


def _native(channel: Channel) -> float:
    tensor = torch.zeros(2)
    times = []
    for _ in range(20):
        meet_all(channel)
        start_s = time.perf_counter()
        add_up_(tensor, channel)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def _machines(channel: Channel) -> list[str]:
    return gather_text(_boot_id(), channel)


def _boot_id() -> str:
    """Return what tells machines apart even where namespaces make several hosts of one."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "unknown"
