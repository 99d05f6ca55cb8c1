"""Calibrate a profile with a few real steps, because units and messages are slower in a run.

Units timed one by one, and messages on otherwise idle cores, are faster than in a run. There ranks
compute without a pause, and messages need cores as well. So six kinds of steps are timed in turn:

1. without communication: scales the seconds of the units;
2. zero2 with whole units and a barrier before the update: fits the bandwidth of the link;
3. zero2 with blocks and a barrier: fits the latency of a message;
4. zero3 with a barrier: fits the time of a gather relative to a reduction;
5. zero2 without a barrier: measures the cost of ranks that do not wait for each other. Where they
   share cores, ranks that are ahead take them from the others;
6. ddp without a barrier: fits the time of an all-reduce, with a whole update on every rank.

Fitting means that the plan timing (`stretto.planner.timing`) predicts the measured seconds.

Finally plans are made with the calibrated profile, with and without a barrier, and timed. A search
also exploits errors of the plan timing; these measurements show by how much it is too optimistic.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import nn

from stretto.bench.peers import (
    NO_COMMUNICATION,
    BenchSetup,
    PyTorchStep,
    StrettoStep,
    model_without_communication,
)
from stretto.cluster.world import Mesh
from stretto.comm.broadcast import broadcast_text
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.shard_layout import ALIGN, make_unit_layout
from stretto.comm.transport import Transport, Work, barrier
from stretto.planner.memory import Footprints
from stretto.planner.plan import Plan, Sharding, Unit
from stretto.planner.planner import make_plan
from stretto.planner.presets import preset_plan
from stretto.planner.profile import Profile
from stretto.planner.timing import time_plan
from stretto.profiler.interleaved_timing import StepRunner, all_reduce_max, time_steps_interleaved
from stretto.profiler.slowdown import BackgroundTraffic
from stretto.strategies.sharded.config import AUTO, ShardedConfig
from stretto.strategies.sharded.shard_collectives import ShardCollectives
from stretto.strategies.sharded.sharded_unit import MemoryTracker, ShardedUnit, UnitDtypes
from stretto.train.estimate_run import num_lanes

_LANE_SHARE_REPEATS = 5
"""How often one lane is timed against all lanes."""


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """The element types, device and collectives of blocks."""

    types: UnitDtypes
    device: str = "cpu"
    algorithm: str = AUTO
    in_host: bool = False
    """Whether blocks are sharded inside each host; then only gathers are timed."""


def count_lanes(mesh: Mesh, config: BlockConfig) -> int:
    """Return how many blocks are in flight at once in a run; one inside a host."""
    return 1 if config.in_host else num_lanes(mesh, config.device, config.algorithm)


class BlockTraffic:
    """The messages of a run without a run: gathers and reductions of one block per lane.

    All ranks call all methods together. `close` ends the threads of the lanes.
    """

    def __init__(self, transport: Transport, config: BlockConfig, num_bytes: int) -> None:
        self._transport, self._config = transport, config
        self._count = count_lanes(transport.mesh, config)
        numel = max(1, num_bytes // config.types.compute.itemsize)
        units = [_sharded_block(transport, config, numel) for _ in range(self._count)]
        self._executor = CollectiveExecutor(transport, free_idle_buffers=True)
        self._collectives = ShardCollectives(self._executor, transport, units, config.algorithm)
        self._in_flight: list[Work] = []
        self._next_index = 0

    def measure_seconds(self) -> float:
        """Return the mean seconds of a reduction or gather while all lanes are busy.

        Lanes share the link, so the seconds of one block are those of all divided by their number.
        """
        collectives = [self._collectives.unshard]
        if not self._config.in_host:
            collectives.append(self._collectives.reduce)
        barrier(self._transport)
        start_s = time.perf_counter()
        for start_collective in collectives:
            self._run_on_all_lanes(start_collective)
        took_s = all_reduce_max(time.perf_counter() - start_s, self._transport)
        return took_s / (len(collectives) * self._count)

    def measure_lane_share(self) -> float:
        """Return the share of the link's rate that a gather on a single lane reaches."""
        if self._count == 1:
            return 1.0
        shares = []
        for _ in range(_LANE_SHARE_REPEATS):
            barrier(self._transport)
            all_s = self._time_gathers_s(range(self._count)) / self._count
            barrier(self._transport)
            shares.append(all_s / self._time_gathers_s(range(1)))
        return min(1.0, statistics.median(shares))

    def _time_gathers_s(self, units: range) -> float:
        start_s = time.perf_counter()
        self._in_flight = [self._collectives.unshard(unit, 0) for unit in units]
        self.wait()
        if self._config.device == "cuda":
            torch.cuda.synchronize()
        return all_reduce_max(time.perf_counter() - start_s, self._transport)

    def _run_on_all_lanes(self, start_collective: Callable[[int, int], Work]) -> None:
        self._in_flight = [start_collective(unit, 0) for unit in range(self._count)]
        self.wait()
        if self._config.device == "cuda":
            torch.cuda.synchronize()

    @property
    def traffic(self) -> BackgroundTraffic:
        """Alternating reductions and gathers that keep the link busy."""
        return BackgroundTraffic(self.start, self.wait)

    def start(self) -> None:
        """Start the next message; earlier ones on the same lane run before it."""
        unit, gathers = self._next_index % self._count, self._next_index // self._count % 2
        start_collective = self._collectives.unshard if gathers else self._collectives.reduce
        self._in_flight.append(start_collective(unit, 0))
        self._next_index += 1

    def wait(self) -> None:
        """Wait for all messages started."""
        for work in self._in_flight:
            work.wait()
        self._in_flight = []

    def close(self) -> None:
        """End the threads of the lanes."""
        self._executor.close()


def _sharded_block(transport: Transport, config: BlockConfig, numel: int) -> ShardedUnit:
    mesh, rank, ranks, grain = transport.mesh, transport.rank, transport.size, ALIGN
    if config.in_host:
        ranks = mesh.ranks_per_host[0]
        rank, grain = rank % ranks, ALIGN * mesh.hosts
    unit_plan = Unit(
        name="block", numel=numel, sharding=Sharding.ZERO2, blocks=(numel,), in_host=config.in_host
    )
    parameter = nn.Parameter(torch.zeros(numel, dtype=config.types.master, device=config.device))
    layout = make_unit_layout([numel], [numel], ranks, grain)
    return ShardedUnit([parameter], layout, unit_plan, rank, config.types, MemoryTracker(1))


# --- calibration steps ---

_ZERO2, _ZERO2_BLOCKS, _ZERO3, _ZERO2_NO_BARRIER = (
    "zero2",
    "zero2 in blocks",
    "zero3",
    "zero2 without a barrier",
)
_DDP = "ddp"
_BLOCKS_PER_UNIT = 4
"""About the number of blocks of the largest unit."""
_BISECTION_STEPS = 12
_MAX_SLOWDOWN = 4.0
"""Upper limit on how much slower than measured alone the link is in a run."""
_MAX_RATIO = 2.0
"""Fitted ratios are between its inverse and it."""
_MAX_LATENCY_S = 0.02
"""Upper limit on the fitted latency."""


class TimedPlan(NamedTuple):
    """A plan and the measured seconds of its step."""

    plan: Plan
    step_s: float

    def is_slower_than_predicted(self, profile: Profile) -> bool:
        """Return whether the step took longer than the plan timing predicts with ``profile``."""
        return time_plan(self.plan, profile).step_s < self.step_s


@dataclass(frozen=True, slots=True)
class CalibrationSteps:
    """The measured seconds of the six kinds of steps, with their plans."""

    compute_s: float
    """Seconds of a step without communication."""
    zero2: TimedPlan
    zero2_blocks: TimedPlan
    zero3: TimedPlan
    zero2_no_barrier: TimedPlan
    ddp: TimedPlan


def time_calibration_steps(
    setup: BenchSetup,
    profile: Profile,
    sharded: ShardedConfig,
    runs: int,
    log_line: Callable[[str], None],
) -> CalibrationSteps:
    """Time the six kinds of steps; all ranks call this together."""
    largest = max(unit.numel for unit in profile.units) * profile.kept_bytes
    base = sharded.model_copy(
        update={"plan": "zero2", "unit": profile.unit_bytes, "memory": None, "profile": None}
    )
    zero2_blocks = base.model_copy(update={"block": max(1, largest // _BLOCKS_PER_UNIT)})
    zero3 = base.model_copy(update={"plan": "zero3"})
    stretto_steps = {
        _ZERO2: StrettoStep(setup, base, barrier=True),
        _ZERO2_BLOCKS: StrettoStep(setup, zero2_blocks, barrier=True),
        _ZERO3: StrettoStep(setup, zero3, barrier=True),
        _ZERO2_NO_BARRIER: StrettoStep(setup, base),
        _DDP: StrettoStep(setup, base.model_copy(update={"plan": "ddp"})),
    }
    plans = {name: one.plan for name, one in stretto_steps.items()}
    built_steps: dict[str, StepRunner] = {
        NO_COMMUNICATION: PyTorchStep(setup, model_without_communication(setup)),
        **stretto_steps,
    }
    seconds = _time_and_close(built_steps, setup, runs, log_line)
    steps = {name: TimedPlan(plan, seconds[name]) for name, plan in plans.items()}
    return CalibrationSteps(
        seconds[NO_COMMUNICATION],
        steps[_ZERO2],
        steps[_ZERO2_BLOCKS],
        zero3=steps[_ZERO3],
        zero2_no_barrier=steps[_ZERO2_NO_BARRIER],
        ddp=steps[_DDP],
    )


def _time_and_close(
    built_steps: Mapping[str, StepRunner],
    setup: BenchSetup,
    runs: int,
    log_line: Callable[[str], None],
) -> dict[str, float]:
    """Return the median seconds of a step of each runner, interleaved; then close them."""
    times = time_steps_interleaved(built_steps, setup.transport, runs=runs, device=setup.device)
    for runner in built_steps.values():
        runner.close()
    seconds = {name: statistics.median(values) for name, values in times.items()}
    for name, step_s in seconds.items():
        log_line(f"a step, {name}: {step_s * 1e3:.1f} ms")
    return seconds


def fit_profile(profile: Profile, calibration: CalibrationSteps) -> Profile:
    """Return the profile with which the plan timing predicts the measured steps.

    The seconds of units and the bandwidth of the link are never made better than measured alone.
    """
    unit_scale = max(
        1.0, (calibration.compute_s - profile.update_s) / max(profile.compute_s, 1e-12)
    )
    units = tuple(unit.scaled(unit_scale) for unit in profile.units)
    profile = _fit_gather_ratio(profile.model_copy(update={"units": units}), calibration)
    no_barrier_slowdown = (
        calibration.zero2_no_barrier.step_s
        / time_plan(calibration.zero2_no_barrier.plan, profile).step_s
    )
    return _fit_all_reduce_ratio(
        profile.model_copy(update={"no_barrier_slowdown": no_barrier_slowdown}), calibration
    )


def time_generated_plans(
    setup: BenchSetup,
    profile: Profile,
    sharded: ShardedConfig,
    runs: int,
    log_line: Callable[[str], None],
) -> list[TimedPlan]:
    """Time plans made with ``profile`` and enough memory for ddp; all ranks call this together."""
    memory_limit = Footprints(profile).peak(preset_plan("ddp", profile.shapes))
    neutral_profile = profile.scaled(1.0)  # the barrier is given, so its cost must not matter
    plans: dict[str, Plan] = {}
    built_steps: dict[str, StepRunner] = {}
    for with_barrier in (False, True):
        name = f"planned, {'with' if with_barrier else 'without'} a barrier"
        plan_json = ""
        if setup.transport.rank == 0:
            plan_json = make_plan(
                neutral_profile, memory_limit, barrier=with_barrier
            ).plan.to_json()
        plan = plans[name] = Plan.model_validate_json(broadcast_text(plan_json, setup.transport))
        with TemporaryDirectory() as folder:
            file = Path(folder) / "plan.json"
            file.write_text(plan.to_json(), encoding="utf-8")
            update = {"plan": str(file), "unit": profile.unit_bytes, "memory": None}
            config = sharded.model_copy(update={**update, "profile": None})
            built_steps[name] = StrettoStep(setup, config, barrier=plan.barrier)
    seconds = _time_and_close(built_steps, setup, runs, log_line)
    return [TimedPlan(plan, seconds[name]) for name, plan in plans.items()]


def correct_generated_plans(profile: Profile, timed_plans: Sequence[TimedPlan]) -> Profile:
    """Return the profile whose factors for reordered plans are those of the timed plans."""
    found: dict[str, float] = {}
    for one in timed_plans:
        if one.plan.is_reordered:
            factor = max(1.0, one.step_s / time_plan(one.plan, profile).step_s)
            found[
                "reordering_slowdown_with_barrier" if one.plan.barrier else "reordering_slowdown"
            ] = factor
    return profile.model_copy(update=found)


def _fit_all_reduce_ratio(profile: Profile, calibration: CalibrationSteps) -> Profile:
    """Return the profile with the all-reduce time that predicts the ddp step."""

    def with_ratio(ratio: float) -> Profile:
        return _with_link(profile, sum_ratio=ratio)

    return with_ratio(
        _find_ratio(lambda ratio: calibration.ddp.is_slower_than_predicted(with_ratio(ratio)))
    )


def _find_ratio(is_slower_than_predicted: Callable[[float], bool]) -> float:
    """Return by bisection the ratio at which the prediction equals the measured time.

    The ratio is between 1 / `_MAX_RATIO` and `_MAX_RATIO`. ``is_slower_than_predicted`` says
    whether the step took longer than predicted with a ratio.
    """
    is_slower = is_slower_than_predicted(1.0)
    near, far = 1.0, _MAX_RATIO if is_slower else 1 / _MAX_RATIO
    for _ in range(_BISECTION_STEPS):
        middle = (near + far) / 2
        if is_slower_than_predicted(middle) == is_slower:
            near = middle
        else:
            far = middle
    return near


def _fit_gather_ratio(profile: Profile, calibration: CalibrationSteps) -> Profile:
    """Return the profile with the gather time that predicts the zero3 step.

    Gathers are half of the traffic of zero2, and two thirds of that of zero3.
    """

    def with_ratio(ratio: float) -> Profile:
        return _fit_latency(_with_link(profile, gather_ratio=ratio), calibration)

    return with_ratio(
        _find_ratio(lambda ratio: calibration.zero3.is_slower_than_predicted(with_ratio(ratio)))
    )


def _fit_latency(profile: Profile, calibration: CalibrationSteps) -> Profile:
    """Return the profile with the latency that predicts the zero2 step in blocks."""
    low_s, high_s = profile.link.latency_s, _MAX_LATENCY_S
    for _ in range(_BISECTION_STEPS):
        middle_s = (low_s + high_s) / 2
        if calibration.zero2_blocks.is_slower_than_predicted(
            _fit_bandwidth(_with_link(profile, latency_s=middle_s), calibration)
        ):
            low_s = middle_s
        else:
            high_s = middle_s
    return _fit_bandwidth(_with_link(profile, latency_s=low_s), calibration)


def _fit_bandwidth(profile: Profile, calibration: CalibrationSteps) -> Profile:
    """Return the profile with the bandwidth that predicts the zero2 step with whole units."""
    low, high = 1.0, _MAX_SLOWDOWN
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        slower = _with_link(profile, bytes_per_s=profile.link.bytes_per_s / middle)
        if calibration.zero2.is_slower_than_predicted(slower):
            low = middle
        else:
            high = middle
    return _with_link(profile, bytes_per_s=profile.link.bytes_per_s / low)


def _with_link(profile: Profile, **changes: float) -> Profile:
    return profile.model_copy(update={"link": profile.link.model_copy(update=changes)})
