"""Time collectives: Stretto's by algorithm, the back end's own, and the lower bound."""

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.bench import CollectiveRequest
from stretto.bench.peers import PeerProcessGroup
from stretto.cluster.world import Mesh, World
from stretto.collectives.algorithm_table import parse_algorithm
from stretto.collectives.algorithms import (
    ALL_GATHER,
    ALLREDUCE,
    BROADCAST,
    REDUCE_SCATTER,
    Algorithm,
)
from stretto.collectives.codecs import parse_wire
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.connect import connect
from stretto.comm.transport import Transport
from stretto.config.formatting import suggest_known_name
from stretto.errors import ConfigError, ScheduleError
from stretto.profiler.interleaved_timing import BenchmarkRow, spread, time_interleaved
from stretto.simulator.algorithm_choice import (
    LARGE_MESSAGE_PARTS,
    LARGE_SIZES,
    NATIVE,
    assumed_cluster,
    choose_table,
    price_all_algorithms,
)
from stretto.simulator.cluster import Cluster, load_cluster
from stretto.simulator.price_cache import AlgorithmPrice
from stretto.units import format_bytes, parse_bytes

COLLECTIVES: Mapping[str, Mapping[str, Algorithm]] = {
    "allreduce": ALLREDUCE,
    "reduce-scatter": REDUCE_SCATTER,
    "all-gather": ALL_GATHER,
    "broadcast": BROADCAST,
}


@dataclass(frozen=True, slots=True)
class CollectiveTrial:
    """A collective of one tensor size on one device type."""

    collective: str
    num_bytes: int
    wire: str = "own"
    device: str = "cpu"

    @property
    def repeat(self) -> int:
        """The number of calls that are timed together, so that the overhead of timing is small."""
        small, medium, large = (100, 50, 10) if self.device == "cuda" else (60, 10, 1)
        return small if self.num_bytes <= 64_000 else medium if self.num_bytes <= 1e6 else large

    def tensor(self) -> Tensor:
        """Return a tensor of zeros, which repeated sums do not change."""
        return torch.zeros(max(1, self.num_bytes // 4), device=self.device)


def time_collective(
    trial: CollectiveTrial,
    algorithms: Mapping[str, str],
    transport: Transport,
    *,
    runs: int,
    peer: Callable[[], None] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds per call of each of ``algorithms``, ``runs`` values each.

    Args:
        trial: The collective.
        algorithms: From labels in the result to algorithms such as ``"ring/4"``.
        transport: Connects the ranks, which all call this together.
        runs: Interleaved repetitions.
        peer: Another implementation of the collective; its label is "peer".
    """
    with CollectiveExecutor(transport) as executor:
        calls_by_label = {
            label: _prepare_call(trial, algorithm, executor, transport)
            for label, algorithm in algorithms.items()
        }
        if peer is not None:
            calls_by_label["peer"] = peer
        return time_interleaved(
            {label: _synchronized(trial, call) for label, call in calls_by_label.items()},
            transport,
            runs=runs,
            repeat=trial.repeat,
        )


def backend_collective(trial: CollectiveTrial, size: int) -> Callable[[], None]:
    """Return a call of the collective in `torch.distributed`'s default process group."""
    shard_numel = max(1, trial.tensor().numel() // size)
    tensor = torch.zeros(shard_numel * size, device=trial.device)
    share = torch.zeros(shard_numel, device=trial.device)
    calls: dict[str, Callable[[], object]] = {
        "allreduce": lambda: dist.all_reduce(tensor),
        "reduce-scatter": lambda: _tensor_collective("reduce_scatter")(share, tensor),
        "all-gather": lambda: _tensor_collective("all_gather")(tensor, share),
        "broadcast": lambda: dist.broadcast(tensor, 0),
    }
    call = calls[trial.collective]
    return lambda: _discard(call())


def _tensor_collective(name: str) -> Callable[[Tensor, Tensor], object]:
    """Return the single-tensor collective ``name`` under its name in this PyTorch version."""
    older_names = {
        "reduce_scatter": "reduce_scatter_tensor",
        "all_gather": "all_gather_into_tensor",
    }
    call: Callable[[Tensor, Tensor], object] = getattr(
        dist, f"{name}_single", getattr(dist, older_names[name])
    )
    return call


def _prepare_call(
    trial: CollectiveTrial, algorithm: str, executor: CollectiveExecutor, transport: Transport
) -> Callable[[], None]:
    name, num_parts = parse_algorithm(algorithm, COLLECTIVES[trial.collective].keys())
    schedule = COLLECTIVES[trial.collective][name](transport.mesh, num_parts)
    tensor = trial.tensor()
    wire = parse_wire(trial.wire)
    if wire.kept_fraction is not None:
        raise ConfigError(f"wire {trial.wire!r} is no collective: it is timed by a training step")
    if wire.dtype is None or wire.dtype == tensor.dtype:
        bound = executor.prepare(schedule, tensor, codec=wire.codec)
        return lambda: executor.run(bound)
    compressed = tensor.to(wire.dtype)
    bound = executor.prepare(schedule, compressed)

    def call() -> None:
        compressed.copy_(tensor)
        executor.run(bound)
        tensor.copy_(compressed)

    return call


def _synchronized(trial: CollectiveTrial, call: Callable[[], None]) -> Callable[[], None]:
    """Return a call that waits for the GPU, if there is one, before it returns."""
    if trial.device == "cpu":
        return call

    def call_and_synchronize() -> None:
        call()
        torch.cuda.synchronize()

    return call_and_synchronize


def _discard(_value: object) -> None:
    """Drop the result of a blocking call, which is None."""


HYBRID, ALL, LIKELY = "hybrid", "all", "likely"
"""Labels for the table's choice at each size, all algorithms, and those with the best prices."""


@dataclass(frozen=True, slots=True)
class CollectiveBenchRequest:
    """A parsed and checked `CollectiveRequest`."""

    trials: tuple[CollectiveTrial, ...]
    labels: tuple[str, ...] = ()
    """Algorithms such as ``"ring/4"``, "hybrid", "all" or "likely"; empty for "likely"."""
    cluster: Cluster | None = None
    """The description that "likely" and "hybrid" are derived from; None assumes one."""
    runs: int = 5


def parse_request(
    options: CollectiveRequest, cluster: Path | None, runs: int
) -> CollectiveBenchRequest:
    """Return the trials that ``options`` describe, checked before the ranks connect.

    Raises:
        ConfigError: A size, algorithm, collective, wire or device is unknown, or the cluster
            description ``cluster`` cannot be read.
    """
    if options.collective not in COLLECTIVES:
        suggestion = suggest_known_name(options.collective, list(COLLECTIVES), "known")
        raise ConfigError(f"no collective {options.collective!r}{suggestion}")
    _check_device(options.device)
    trials = tuple(
        CollectiveTrial(options.collective, parse_bytes(size), options.wire, options.device)
        for size in options.sizes.split(",")
    )
    cluster_description = load_cluster(cluster) if cluster else None
    labels = [label.strip() for label in options.algorithms.split(",") if label.strip()]
    supported = _supported_algorithms(trials[0])
    for label in labels:
        _check_label(label, trials[0], supported)
    return CollectiveBenchRequest(trials, tuple(labels), cluster_description, runs)


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"no device {device!r}; known: cpu (Gloo), cuda (NCCL)")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU here; take cpu, or a machine with one")


def _check_label(label: str, trial: CollectiveTrial, supported: Collection[str]) -> None:
    if label == HYBRID and trial.collective != "allreduce":
        raise ConfigError(
            f"{HYBRID} stands for a table of all-reduce algorithms, there is none for "
            f"{trial.collective}: name one of {', '.join(COLLECTIVES[trial.collective])}"
        )
    if label in (HYBRID, ALL, LIKELY):
        return
    name, _ = parse_algorithm(label, COLLECTIVES[trial.collective].keys())
    if name not in supported:
        raise ConfigError(
            f"--wire {trial.wire} is summed hop by hop, which the back end's own all-reduce "
            f"cannot do: take {label} out of --algorithms"
        )


def _supported_algorithms(trial: CollectiveTrial) -> dict[str, Algorithm]:
    """Return the algorithms that support the wire format; the native one sums plain types only."""
    wire = parse_wire(trial.wire)
    if wire.kept_fraction is not None:
        raise ConfigError(
            f"wire {trial.wire!r} is no collective: it is timed by `stretto bench step "
            f"strategy.wire='{trial.wire}'`"
        )
    algorithms = COLLECTIVES[trial.collective]
    return {name: make for name, make in algorithms.items() if wire.codec is None or name != NATIVE}


def bench_collectives(
    world: World, request: CollectiveBenchRequest, log_line: Callable[[str], None]
) -> list[BenchmarkRow]:
    """Time the algorithms and the back end of every trial, interleaved; all ranks call this."""
    torch.set_num_threads(world.threads)
    device = request.trials[0].device
    transport = connect(world, device=device)
    rows: list[BenchmarkRow] = []
    with PeerProcessGroup(world, device):
        for trial in request.trials:
            labels = algorithms_to_time(trial, request, world, transport.mesh)
            log_line(f"{_trial_name(trial)}: {', '.join(labels)}")
            times = time_collective(
                trial,
                labels,
                transport,
                runs=request.runs,
                peer=backend_collective(trial, transport.size),
            )
            rows += _result_rows(trial, times, world, transport.mesh)
    transport.close()
    return rows


def algorithms_to_time(
    trial: CollectiveTrial, request: CollectiveBenchRequest, world: World, mesh: Mesh
) -> dict[str, str]:
    """Return the algorithms to time for ``trial`` by their labels."""
    cluster = request.cluster or assumed_cluster(mesh, world.link_bits_per_s)
    labels = list(request.labels or [LIKELY])
    if ALL in labels or LIKELY in labels:
        named = [label for label in labels if label not in (ALL, LIKELY)]
        labels = [
            *named,
            *likely_algorithms(trial, cluster.with_mesh(mesh), include_all=ALL in labels),
        ]
    algorithms = {label: label for label in labels}
    if HYBRID in labels:
        # Without a description of GPU links, the table leaves the choice to NCCL.
        is_undescribed = request.cluster is None and trial.device == "cuda"
        cluster_and_mesh = (None, Mesh((1,))) if is_undescribed else (cluster, mesh)
        table = choose_table(*cluster_and_mesh, native=NATIVE in _supported_algorithms(trial))
        algorithms[HYBRID] = table.pick(trial.num_bytes).word
    return algorithms


def likely_algorithms(
    trial: CollectiveTrial, cluster: Cluster, *, include_all: bool = False, max_count: int = 5
) -> list[str]:
    """Return the cheapest algorithms by price, at most ``max_count``, and the native one.

    With ``include_all`` all algorithms are returned, each in its cheapest number of parts.
    """
    algorithms = {
        n: make
        for n, make in _supported_algorithms(trial).items()
        if _has_schedule(make, cluster.mesh)
    }
    parts = LARGE_MESSAGE_PARTS if trial.num_bytes >= LARGE_SIZES[0] else (1,)
    rows = price_all_algorithms(cluster, [trial.num_bytes], parts, algorithms).at(trial.num_bytes)
    best: dict[str, AlgorithmPrice] = {}
    for row in rows:
        best.setdefault(row.name, row)
    if include_all:
        return sorted({*best, *(row.word for row in best.values())})
    native_entry = [NATIVE] if NATIVE in algorithms else []
    cheapest = _drop_equivalent(best.values())[:max_count]
    return [*dict.fromkeys([*(row.word for row in cheapest), *native_entry])]


def _drop_equivalent(rows: Iterable[AlgorithmPrice]) -> list[AlgorithmPrice]:
    """Drop algorithms with the same programs as an earlier one: on some meshes they coincide."""
    kept: dict[tuple[object, ...], AlgorithmPrice] = {}
    for row in rows:
        end_programs = (row.schedule.program(0), row.schedule.program(row.schedule.size - 1))
        kept.setdefault((row.name == NATIVE, row.schedule.num_chunks, *end_programs), row)
    return list(kept.values())


def _has_schedule(algorithm: Algorithm, mesh: Mesh) -> bool:
    """Return whether ``algorithm`` supports ``mesh``; some need hosts of equal size."""
    try:
        algorithm(mesh, 1)
    except ScheduleError:
        return False
    return True


def collective_bound_s(trial: CollectiveTrial, world: World, mesh: Mesh) -> float | None:
    """Return the seconds that a host's link needs for the required bytes; None without a rate."""
    if world.link_bits_per_s is None or mesh.hosts == 1:
        return None
    share = (mesh.hosts - 1) / mesh.hosts
    times = {"allreduce": 2 * share, "broadcast": 1.0}.get(trial.collective, share)
    return times * _wire_bytes(trial) * 8 / world.link_bits_per_s


def _wire_bytes(trial: CollectiveTrial) -> float:
    """Return the bytes of the whole tensor on the wire."""
    wire = parse_wire(trial.wire)
    elements = trial.num_bytes / torch.float32.itemsize
    if wire.codec is not None:
        return wire.codec.num_bytes([round(elements)])
    return elements * (wire.dtype or torch.float32).itemsize


def _trial_name(trial: CollectiveTrial) -> str:
    wire = "" if trial.wire == "own" else f" as {trial.wire}"
    return f"{trial.collective} {format_bytes(trial.num_bytes)}{wire}"


def _result_rows(
    trial: CollectiveTrial, times: dict[str, list[float]], world: World, mesh: Mesh
) -> list[BenchmarkRow]:
    peer = "nccl" if trial.device == "cuda" else "gloo"
    peer_s = statistics.median(times["peer"])
    bound = collective_bound_s(trial, world, mesh)
    return [
        BenchmarkRow(
            f"{_trial_name(trial)}, {mesh.shape}, {label}",
            statistics.median(values),
            peer,
            peer_s,
            bound,
            len(values),
            spread(values),
        )
        for label, values in times.items()
        if label != "peer"
    ]
