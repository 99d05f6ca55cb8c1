"""The planner: choose each unit's sharding and each message's window within a memory limit.

1. A MILP (`stretto.planner.milp`) relaxes the problem. Its solution shows which options are worth
   their memory, and its optimum is a lower bound on the time of a step.
2. Candidate plans are built from that solution and from simpler heuristics. Each candidate keeps
   within the memory limit by construction, and is timed by simulation.
3. Local search improves the fastest candidate.

Named presets that fit (zero2, zero3, ...) are candidates too: no result is slower than one of them.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from stretto.planner.candidates import Candidates, is_valid_plan
from stretto.planner.heuristic_split import LeastTrafficSplit
from stretto.planner.local_search import improve_best_plan
from stretto.planner.memory import Footprints
from stretto.planner.message_windows import trim_windows
from stretto.planner.milp import MilpModel
from stretto.planner.plan import Plan
from stretto.planner.profile import Profile
from stretto.planner.solver import (
    MilpProblem,
    Solution,
    Solver,
    SolverArrays,
    keep_solver_processes,
)
from stretto.planner.unit_choices import (
    OptionAssigner,
    PlanConstraints,
    UnitOption,
    all_options,
    refuse_if_infeasible,
)

_MAX_GROUPS = 40
_MIP_GAP = 1e-3
_LEAST_TRAFFIC_SHARES = (1.0, 0.85, 0.6)
"""Shares of the memory above the minimum at which the options of least traffic are tried."""
_LEAST_TRAFFIC_MAX_UNITS = 128
"""Models with more units skip the options of least traffic."""
_LP_TIME_LIMIT_S, _MILP_TIME_LIMIT_S = 10.0, 0.5
"""Solver time limits. The integer solution is rarely far from the rounded continuous one."""


def group_units(weights: Sequence[float], max_groups: int) -> list[range]:
    """Split units into at most ``max_groups`` groups of neighbours; minimise the heaviest group.

    Groups bound the size of the MILP, however many units the model has.
    """
    count = len(weights)
    if count <= max_groups:
        return [range(i, i + 1) for i in range(count)]
    low, high = max(max(weights), sum(weights) / max_groups), sum(weights)
    groups = _split_by_weight(weights, high)
    for _ in range(40):
        middle = (low + high) / 2
        trial = _split_by_weight(weights, middle)
        if len(trial) <= max_groups:
            groups, high = trial, middle
        else:
            low = middle
    return groups


def _split_by_weight(weights: Sequence[float], limit: float) -> list[range]:
    groups: list[range] = []
    start, filled = 0, 0.0
    for index, weight in enumerate(weights):
        if index > start and filled + weight > limit:
            groups.append(range(start, index))
            start, filled = index, 0.0
        filled += weight
    groups.append(range(start, len(weights)))
    return groups


@dataclass(frozen=True, slots=True)
class PlanningResult:
    """A plan with its predicted time and memory."""

    plan: Plan
    step_s: float
    peak_bytes: int
    memory_limit: int
    bound_s: float
    """Lower bound on the step time of every plan for this profile and memory limit."""
    greedy_s: float
    """Step time of the best plan found without the MILP."""
    duals: tuple[float, ...]
    """For each slot: seconds saved per extra byte of memory in that slot."""
    how: str
    """The name of the candidate that the plan comes from: a preset or a heuristic."""

    @property
    def gap(self) -> float:
        """How much slower than the bound the plan is, as a share of the bound."""
        return self.step_s / self.bound_s - 1 if self.bound_s else 0.0


def make_plan(
    profile: Profile,
    memory_limit: int,
    constraints: PlanConstraints = PlanConstraints(),  # noqa: B008
    *,
    barrier: bool = False,
) -> PlanningResult:
    """Return the best plan found that keeps within ``memory_limit`` bytes on every rank.

    Args:
        profile: The costs of the model's units and of the link.
        memory_limit: Bytes that a rank may use.
        constraints: The options that the plan may use.
        barrier: Whether the update must wait for all gradients. If False, the planner plans both
            ways when the profile says that ranks lose time without a barrier, and keeps the faster.

    Raises:
        InsufficientMemoryError: No plan fits. The message names the least memory that would do.
    """
    if barrier or constraints.barrier:
        return _plan_once(profile, memory_limit, replace(constraints, barrier=True))
    slowdown = profile.no_barrier_slowdown * max(1.0, profile.reordering_slowdown)
    if slowdown <= 1.0:  # a barrier only forbids
        return _plan_once(profile, memory_limit, constraints)
    with keep_solver_processes():
        without_barrier = _plan_once(profile, memory_limit, constraints)
        with_barrier = make_plan(profile, memory_limit, constraints, barrier=True)
    best = min(without_barrier, with_barrier, key=attrgetter("step_s"))
    return replace(
        best,
        bound_s=min(without_barrier.bound_s, with_barrier.bound_s),
        greedy_s=min(without_barrier.greedy_s, with_barrier.greedy_s),
    )


def _plan_once(profile: Profile, memory_limit: int, constraints: PlanConstraints) -> PlanningResult:
    """Return the best plan found for one choice of ``constraints.barrier``.

    Options are compared as if messages kept the order of use. Each plan that is built is timed with
    its own order.
    """
    scaled_profile = profile.scaled(1.0 if constraints.barrier else profile.no_barrier_slowdown)
    # Both solver processes take half a second to start. Start them together, before other work.
    with Solver() as lp_solver, Solver() as milp_solver, ThreadPoolExecutor(1) as pool:
        footprints = Footprints(profile)
        options = all_options(scaled_profile, constraints, footprints)
        assigner = OptionAssigner(scaled_profile, options, footprints, constraints)
        refuse_if_infeasible(scaled_profile, memory_limit, assigner, footprints)
        candidates = Candidates(profile, memory_limit, constraints, assigner)
        milp_model = MilpModel(
            scaled_profile, options, _unit_groups(scaled_profile, options), constraints
        )
        problem = milp_model.problem(memory_limit)
        arrays = solver_arrays(problem)
        milp_future = pool.submit(
            milp_solver.solve, arrays, integral=True, limit_s=_MILP_TIME_LIMIT_S
        )
        candidates.try_presets()
        candidates.try_options(
            "greedy", assigner.fit_to_memory(assigner.fastest_options(), memory_limit)
        )
        greedy_s = candidates.best_step_s
        lp_solution = lp_solver.solve(arrays, integral=False, limit_s=_LP_TIME_LIMIT_S)
        for selected_options in _least_traffic_options(
            scaled_profile, assigner, memory_limit, lp_solver
        ):
            candidates.try_options("least traffic", selected_options)
        for name, found in (("fractions", lp_solution), ("whole", milp_future.result())):
            if found is not None and found.x is not None:
                selected_options = assigner.fit_to_memory(
                    milp_model.selected_options(found.x), memory_limit
                )
                candidates.try_options(name, selected_options, milp_model, found.x)
    improve_best_plan(candidates)
    bounds = [found.bound for found in (lp_solution, milp_future.result()) if found is not None]
    best = candidates.best
    trimmed_plan = trim_windows(best.plan, profile)
    if is_valid_plan(trimmed_plan) and candidates.step_s(trimmed_plan) <= best.step_s * (1 + 1e-9):
        best = best._replace(plan=trimmed_plan)
    return PlanningResult(
        plan=best.plan.replace(unit_bytes=profile.unit_bytes),
        step_s=best.step_s,
        peak_bytes=footprints.peak(best.plan),
        memory_limit=memory_limit,
        bound_s=max(
            [scaled_profile.compute_s, *(problem.base_s - problem.slack_s + b for b in bounds)]
        ),
        greedy_s=greedy_s,
        duals=_duals_by_slot(milp_model, problem, lp_solution, memory_limit),
        how=best.name,
    )


def _least_traffic_options(
    profile: Profile, assigner: OptionAssigner, memory_limit: int, solver: Solver
) -> Iterator[list[UnitOption]]:
    """Yield options of least traffic that leave different amounts of memory for prefetching."""
    if len(assigner.options) > _LEAST_TRAFFIC_MAX_UNITS:
        return
    split = LeastTrafficSplit(profile, assigner)
    least = min(
        memory_limit,
        assigner.footprints.peak(assigner.just_in_time_plan_of(assigner.least_memory_options())),
    )
    for share in _LEAST_TRAFFIC_SHARES:
        selected_options = split.least_traffic(
            round(least + share * (memory_limit - least)), solver
        )
        if selected_options is not None:
            yield selected_options


def _unit_groups(profile: Profile, options: Sequence[tuple[UnitOption, ...]]) -> list[range]:
    """Return groups of units with similar compute time plus link time."""
    link_seconds = [max(option.link_s for option in unit_options) for unit_options in options]
    compute_seconds = [unit.forward_s + unit.backward_s for unit in profile.units]
    shares = [
        link / max(sum(link_seconds), 1e-12) + device / max(sum(compute_seconds), 1e-12)
        for link, device in zip(link_seconds, compute_seconds, strict=True)
    ]
    return group_units(shares, _MAX_GROUPS)


def solver_arrays(problem: MilpProblem) -> SolverArrays:
    """Return ``problem`` as the arrays by name that `Solver.solve` takes."""
    rows = problem.rows
    return {
        "cost": problem.cost,
        "upper": problem.upper,
        "integral": problem.integral,
        "rows": np.array(rows.rows, dtype=float),
        "columns": np.array(rows.columns, dtype=float),
        "values": np.array(rows.values),
        "lower": np.array(rows.lower),
        "upper_rows": np.array(rows.upper),
        "gap": np.array([_MIP_GAP]),
    }


def _duals_by_slot(
    milp_model: MilpModel, problem: MilpProblem, found: Solution | None, memory_limit: int
) -> tuple[float, ...]:
    """Return the seconds saved per extra byte in each slot.

    For a group of several units, the value belongs to the slot in which memory was limited.
    """
    by_slot = [0.0] * milp_model.num_slots
    if found is None:
        return tuple(by_slot)
    for interval, row in enumerate(problem.memory_rows):
        by_slot[milp_model.fullest_slot(interval)] = float(found.duals[row]) / memory_limit
    return tuple(by_slot)
