"""Compare plans for different memory limits, link rates, latencies and numbers of ranks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.config.formatting import suggest_known_name
from stretto.errors import ConfigError
from stretto.optim import LAMBConfig, LARSConfig
from stretto.planner.memory import Footprints
from stretto.planner.planner import PlanningResult, make_plan
from stretto.planner.profile import Profile
from stretto.planner.solver import keep_solver_processes
from stretto.planner.unit_choices import (
    InsufficientMemoryError,
    OptionAssigner,
    PlanConstraints,
    all_options,
)
from stretto.run import RunConfig
from stretto.strategies.sharded.config import ShardedConfig
from stretto.units import format_bytes, parse_bits_per_s, parse_bytes


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The input of the planner."""

    profile: Profile
    memory_limit: int
    constraints: PlanConstraints

    def plan(self) -> PlanningResult:
        """Return the plan."""
        return make_plan(self.profile, self.memory_limit, self.constraints)


def allowed_choices(config: RunConfig) -> PlanConstraints:
    """Return the options that a plan for this run may use."""
    strategy = config.strategy
    checkpoint = isinstance(strategy, ShardedConfig) and strategy.checkpoint
    return PlanConstraints(
        checkpoint=checkpoint,
        barrier=config.train.reads_gradients,
        whole_layers=isinstance(config.optim, LARSConfig | LAMBConfig),
    )


def apply_changes(request: PlanRequest, text: str) -> PlanRequest:
    """Return the request with the changes of ``text``, such as "memory=8GiB,rate=10gbit,ranks=16".

    Raises:
        ConfigError: A name is unknown, or a value is invalid.
    """
    for pair in text.split(","):
        name, found, value = pair.strip().partition("=")
        if name not in _CHANGES or not found:
            raise ConfigError(
                f"--what-if {pair.strip()!r}: expected word=value"
                f"{suggest_known_name(name, list(_CHANGES), 'known')}"
            )
        request = _CHANGES[name](request, value)
    return request


def _with_memory(request: PlanRequest, value: str) -> PlanRequest:
    return replace(request, memory_limit=parse_bytes(value))


def _with_rate(request: PlanRequest, value: str) -> PlanRequest:
    rate = parse_bits_per_s(value) / 8
    if not rate:
        raise ConfigError(f"--what-if rate={value}: nothing could be sent")
    return _with_link(request, bytes_per_s=rate)


def _with_latency(request: PlanRequest, value: str) -> PlanRequest:
    number, unit = value.strip()[:-2], value.strip()[-2:]
    scales = {"us": 1e-6, "ms": 1e-3}
    try:
        return _with_link(request, latency_s=float(number) * scales[unit])
    except (ValueError, KeyError):
        raise ConfigError(f'--what-if latency={value}: expected "50us" or "1ms"') from None


def _with_ranks(request: PlanRequest, value: str) -> PlanRequest:
    hosts = request.profile.link.hosts
    if not value.isdecimal() or int(value) < 1 or int(value) % hosts:
        raise ConfigError(f"--what-if ranks={value}: expected a multiple of {hosts} (hosts)")
    return _with_link(request, ranks=int(value))


def _with_link(request: PlanRequest, **changes: object) -> PlanRequest:
    link = request.profile.link.model_copy(update=changes)
    return replace(request, profile=request.profile.model_copy(update={"link": link}))


_CHANGES: dict[str, Callable[[PlanRequest, str], PlanRequest]] = {
    "memory": _with_memory,
    "rate": _with_rate,
    "latency": _with_latency,
    "ranks": _with_ranks,
}


@keep_solver_processes()
def pareto(request: PlanRequest, count: int) -> list[tuple[int, float]]:
    """Return ``count`` memory limits with the step time of the best plan for each.

    The limits range evenly from the least that any plan needs to what the fastest options need.
    """
    footprints = Footprints(request.profile)
    options = all_options(request.profile, request.constraints, footprints)
    assigner = OptionAssigner(request.profile, options, footprints, request.constraints)
    least = footprints.peak(assigner.just_in_time_plan_of(assigner.least_peak_options()))
    most = max(least, footprints.peak(assigner.just_in_time_plan_of(assigner.fastest_options())))
    points: list[tuple[int, float]] = []
    for number in range(count):
        memory_limit = least + (most - least) * number // max(count - 1, 1)
        try:
            points.append((memory_limit, replace(request, memory_limit=memory_limit).plan().step_s))
        except InsufficientMemoryError:
            continue
    # A plan for less memory also fits into more, so more memory is never slower.
    best = float("inf")
    for index, (memory_limit, step_s) in enumerate(points):
        best = min(best, step_s)
        points[index] = memory_limit, best
    return points


def check_parent_folder(path: Path, flag: str) -> None:
    """Check that the folder of ``path`` exists; ``flag`` is the option that named it.

    Raises:
        ConfigError: There is no such folder.
    """
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.absolute().parent}")


def describe_comparison(name: str, before: PlanningResult, after: PlanningResult) -> str:
    """Return a line that compares the plan ``after`` a change with the one ``before``."""
    share = after.step_s / before.step_s - 1
    return (
        f"{name}: {after.step_s * 1e3:.1f} ms a step ({share:+.1%}), keeping "
        f"{format_bytes(after.peak_bytes)}"
    )
