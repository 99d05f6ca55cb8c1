"""Measure the cost of messages between ranks: latency, bandwidth and CPU time.

All ranks call these functions together. One pair of ranks exchanges messages to measure seconds.
All pairs of a host exchange at once to measure core-seconds, by the processes' own CPU times.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from stretto.cluster.world import Mesh
from stretto.comm.transport import P2POp, Transport, all_gather_text, all_reduce_small_, barrier
from stretto.planner.profile import LatencyBandwidth

MESSAGE_SIZES = tuple(64_000 * 2**power for power in range(10))
"""Message sizes in bytes, from latency-bound to bandwidth-bound."""
_MIN_POINTS = 4
"""Sizes that are measured in any case."""
_STOP_ABOVE_S = 0.2
"""After a message that takes this long, larger ones are not measured."""


def measure_message_cost(
    seconds_of: Callable[[int], float],
    *,
    sizes: Sequence[int] = MESSAGE_SIZES,
    repeats: int = 5,
    log_line: Callable[[str], None] = lambda _line: None,
) -> LatencyBandwidth:
    """Return the latency and the time per byte, fitted to the median times of several sizes.

    Args:
        seconds_of: Sends one message of a number of bytes and returns its seconds. It must return
            the same number on every rank, because that decides whether larger ones follow.
        sizes: Message sizes in bytes.
        repeats: Messages of each size; one more at the start is not counted.
        log_line: Receives progress.
    """
    points: list[tuple[int, float]] = []
    for size in sizes:
        seconds_of(size)
        median_s = statistics.median(seconds_of(size) for _ in range(repeats))
        points.append((size, median_s))
        log_line(f"messages of {size / 1e6:.2g} MB: {median_s * 1e3:.3g} ms")
        if median_s > _STOP_ABOVE_S and len(points) >= _MIN_POINTS:
            break
    return fit_message_cost(points)


def fit_message_cost(points: Sequence[tuple[int, float]]) -> LatencyBandwidth:
    """Return the least-squares line through ``points`` of (bytes, seconds).

    Errors are relative, so a small message counts as much as a large one. A negative latency, or a
    negative time per byte, is replaced by a line through zero.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    mean_x = _weighted_mean([float(size) for size, _ in points], weights)
    mean_y = _weighted_mean([seconds for _, seconds in points], weights)
    covariance = _weighted_mean([(size - mean_x) * (s - mean_y) for size, s in points], weights)
    variance = _weighted_mean([(size - mean_x) ** 2 for size, _ in points], weights)
    slope = covariance / variance if variance else 0.0
    if slope <= 0 or mean_y < slope * mean_x:
        return LatencyBandwidth(0.0, _slope_through_zero(points, weights))
    return LatencyBandwidth(mean_y - slope * mean_x, slope)


def _slope_through_zero(points: Sequence[tuple[int, float]], weights: Sequence[float]) -> float:
    products = _weighted_mean([size * seconds for size, seconds in points], weights)
    return products / _weighted_mean([float(size) ** 2 for size, _ in points], weights)


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


# --- latency, bandwidth and CPU time of links ---

_TINY_BYTES = 8
_LARGE_MESSAGE_BYTES = 8_000_000
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class MeasuredLinkCost:
    """The cost of messages on one kind of link."""

    latency_s: float
    """Seconds of an exchange of a few bytes."""
    bytes_per_s: float
    """Rate of one pair of ranks in each direction, both directions at once."""
    core_s_per_byte: float
    core_s_per_message: float
    buffered_bytes: float
    """Bytes at the end of a message that the sender does not wait for."""
    queued_bytes: float
    """Bytes that a message in transit queues before others of the same host; 0 inside a host."""


@dataclass(frozen=True, slots=True)
class LinkMeasurements:
    """The measured costs between hosts and inside a host; None where there are no such ranks."""

    between: MeasuredLinkCost | None
    inside: MeasuredLinkCost | None
    core_s_per_byte_added: float
    native_s: float
    """Seconds of the back end's own all-reduce of a few bytes."""
    machines: int
    """Number of physical machines: in a lab all hosts are on one."""
    cores: int
    """Cores of one machine."""


@dataclass(frozen=True, slots=True)
class _ElapsedTimes:
    """Seconds of each rank, and core-seconds of all ranks together."""

    per_rank_s: tuple[float, ...]
    core_s: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the slowest rank."""
        return max(self.per_rank_s)


def measure_links(
    transport: Transport, log_line: Callable[[str], None], device: str = "cpu"
) -> LinkMeasurements:
    """Measure all costs with tensors on ``device``; takes about ten seconds.

    All ranks call this together. ``log_line`` receives progress.
    """
    mesh = transport.mesh
    benchmark = _LinkBenchmark(transport, device)
    machines = _machine_ids(transport)
    between = inside = None
    if mesh.hosts > 1:
        log_line("messages between two hosts")
        between = benchmark.measure_between_hosts(0, mesh.ranks_on_host(1).start)
    if max(mesh.ranks_per_host) > 1:
        log_line("messages inside a host")
        inside = benchmark.cost(pair_local_ranks(mesh))
    log_line("additions, and the back end's own all-reduce")
    return LinkMeasurements(
        between,
        inside,
        benchmark.addition_core_s_per_byte(),
        benchmark.native_all_reduce_s(),
        len(set(machines)),
        psutil.cpu_count() or 1,
    )


def pair_local_ranks(mesh: Mesh) -> dict[int, int]:
    """Return the pairs of ranks of each host, in both directions; an odd rank is left out."""
    pairs: dict[int, int] = {}
    for host in range(mesh.hosts):
        local = list(mesh.ranks_on_host(host))
        for first, second in zip(local[::2], local[1::2], strict=False):
            pairs |= {first: second, second: first}
    return pairs


class _LinkBenchmark:
    """Times messages over one transport with tensors on one kind of device."""

    def __init__(self, transport: Transport, device: str) -> None:
        self._transport = transport
        self._device = device
        self._finish: Callable[[], None] = (
            torch.cuda.synchronize if device == "cuda" else lambda: None
        )

    def cost(self, pairs: Mapping[int, int]) -> MeasuredLinkCost:
        """Return the cost of messages between ``pairs`` of ranks.

        Seconds are those of the first pair on its own, core-seconds those of all pairs at once.
        """
        first = next(iter(pairs))
        single_pair = {first: pairs[first], pairs[first]: first}
        tiny = [self._exchange(single_pair, _TINY_BYTES, 100) for _ in range(10)]
        large = [self._exchange(single_pair, _LARGE_MESSAGE_BYTES, 1) for _ in range(5)]
        busy = self._exchange(pairs, _LARGE_MESSAGE_BYTES, 6)
        bytes_per_s = _LARGE_MESSAGE_BYTES / statistics.median(work.seconds for work in large)
        return MeasuredLinkCost(
            # The minimum, because noise only makes messages slower.
            latency_s=min(work.seconds for work in tiny) / 100,
            bytes_per_s=bytes_per_s,
            core_s_per_byte=busy.core_s / (len(pairs) * _LARGE_MESSAGE_BYTES * 6),
            core_s_per_message=min(work.core_s for work in tiny) / (2 * 100),
            buffered_bytes=bytes_per_s * self._sender_lead_s(first, pairs[first]),
            queued_bytes=0.0,
        )

    def measure_between_hosts(self, one: int, other: int) -> MeasuredLinkCost:
        """Return the cost, with its queue, between two ranks of different hosts."""
        cost = self.cost({one: other, other: one})
        queueing_s = self._queueing_delay_s(one, other, _LARGE_MESSAGE_BYTES / cost.bytes_per_s)
        return replace(cost, queued_bytes=cost.bytes_per_s * queueing_s)

    def _queueing_delay_s(self, source: int, target: int, large_s: float) -> float:
        """Return the extra seconds of a small message while its host sends a large one.

        This delays the ready message that a receiver sends to its sender before each transfer.
        """
        if self._device == "cuda":  # NCCL sends no ready message: both ends are in one call
            return 0.0
        self._transport.reserve(2)
        idle_s = self._small_message_s(source, target)
        large = torch.zeros(_LARGE_MESSAGE_BYTES, dtype=torch.uint8)
        loaded_s = []
        for _ in range(3):
            barrier(self._transport)
            with ThreadPoolExecutor(1) as pool:
                bulk = pool.submit(self._send_bulk, large, source, target)
                time.sleep(large_s / 2)
                loaded_s.append(self._small_message_s(source, target))
                bulk.result()
        return max(0.0, statistics.median(loaded_s) - idle_s)

    def _send_bulk(self, large: torch.Tensor, source: int, target: int) -> None:
        sends = [P2POp(target, large, 1)] if self._transport.rank == source else []
        receives = [P2POp(source, large, 1)] if self._transport.rank == target else []
        for _ in range(3):
            self._transport.exchange(sends, receives)

    def _small_message_s(self, source: int, target: int) -> float:
        """Return on all ranks the median seconds of small messages that ``source`` receives."""
        tiny = torch.zeros(_TINY_BYTES, dtype=torch.uint8)
        sends = [P2POp(source, tiny)] if self._transport.rank == target else []
        receives = [P2POp(target, tiny)] if self._transport.rank == source else []
        times = []
        for _ in range(12):
            start_s = time.perf_counter()
            self._transport.exchange(sends, receives)
            times.append(time.perf_counter() - start_s)
        reported_s = torch.zeros(1, dtype=torch.float64)
        reported_s += statistics.median(times) if self._transport.rank == source else 0.0
        all_reduce_small_(reported_s, self._transport)
        return float(reported_s)

    def _sender_lead_s(self, source: int, target: int) -> float:
        """Return how many seconds a sender finishes a large message before its receiver."""
        tensor = torch.zeros(_LARGE_MESSAGE_BYTES, dtype=torch.uint8, device=self._device)
        sends = [P2POp(target, tensor)] if self._transport.rank == source else []
        receives = [P2POp(source, tensor)] if self._transport.rank == target else []

        def work() -> None:
            self._transport.exchange(sends, receives)
            self._finish()

        leads_s = []
        for _ in range(5):
            elapsed_by_rank_s = self._time_on_all_ranks(work).per_rank_s
            leads_s.append(elapsed_by_rank_s[target] - elapsed_by_rank_s[source])
        return max(0.0, statistics.median(leads_s))

    def addition_core_s_per_byte(self) -> float:
        """Return the core-seconds per added byte while all ranks add at once."""
        left, right = (
            torch.zeros(_LARGE_MESSAGE_BYTES // 4, device=self._device) for _ in range(2)
        )
        times = []
        barrier(self._transport)
        for _ in range(5):
            start_s = time.thread_time()
            left.add_(right)
            times.append((time.thread_time() - start_s) / _LARGE_MESSAGE_BYTES)
        total = torch.tensor([statistics.median(times)], dtype=torch.float64)
        all_reduce_small_(total, self._transport)
        return float(total) / self._transport.size

    def native_all_reduce_s(self) -> float:
        """Return the median seconds of the back end's own all-reduce of a few bytes."""
        tensor = torch.zeros(2, device=self._device)
        times = []
        for _ in range(20):
            barrier(self._transport)
            start_s = time.perf_counter()
            all_reduce_small_(tensor, self._transport)
            self._finish()
            times.append(time.perf_counter() - start_s)
        return statistics.median(times)

    def _exchange(self, pairs: Mapping[int, int], num_bytes: int, times: int) -> _ElapsedTimes:
        """Time ``times`` exchanges of ``num_bytes`` by every pair, both directions at once."""
        peer = pairs.get(self._transport.rank)
        sent, received = (
            torch.zeros(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)
        )

        def work() -> None:
            for _ in range(times if peer is not None else 0):
                assert peer is not None
                self._transport.exchange([P2POp(peer, sent)], [P2POp(peer, received)])
                self._finish()

        return self._time_on_all_ranks(work)

    def _time_on_all_ranks(self, work: Callable[[], None]) -> _ElapsedTimes:
        barrier(self._transport)
        core_s, start_s = time.process_time(), time.perf_counter()
        work()
        times_by_rank = torch.zeros(self._transport.size, 2, dtype=torch.float64)
        times_by_rank[self._transport.rank, 0] = time.perf_counter() - start_s
        times_by_rank[self._transport.rank, 1] = time.process_time() - core_s
        all_reduce_small_(times_by_rank, self._transport)
        return _ElapsedTimes(tuple(times_by_rank[:, 0].tolist()), float(times_by_rank[:, 1].sum()))


def _machine_ids(transport: Transport) -> list[str]:
    return all_gather_text(_boot_id(), transport)


def _boot_id() -> str:
    """Return an id that network namespaces on one machine share."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "unknown"
