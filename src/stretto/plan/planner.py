"""The planner: how each unit is kept and when every message begins, together, under a budget.

A relaxed problem (`stretto.plan.relaxed`) says which options are worth their memory, and how fast
no plan can be. From its solution, and from simpler ones, plans are built that keep within the
budget by construction; the clock says how long each takes, and the fastest is changed bit by bit
as long as that helps. Presets that fit are among the candidates, so no plan is worse than one.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from stretto.plan.candidates import Candidates, is_sound
from stretto.plan.choosing import Choosing
from stretto.plan.footprint import Footprints
from stretto.plan.groups import group_units
from stretto.plan.handsplit import Split
from stretto.plan.infeasible import refuse
from stretto.plan.options import Allowed, Option, all_options
from stretto.plan.profile import Profile
from stretto.plan.relaxed import Problem, Relaxation
from stretto.plan.search import improve
from stretto.plan.solving import Arrays, Solution, Solver
from stretto.plan.trimming import trimmed
from stretto.plan.value import Plan

_GROUPS = 40
_GAP = 1e-3
_SHARES = (1.0, 0.85, 0.6)
_SPLIT_UNITS = 128
"""For how many units options are also tried that send least in such shares of what a budget has
more than the least that will do."""
_FRACTIONS_S, _WHOLE_S = 10.0, 0.5
"""What the solver may take; the second seldom finds what the first, rounded, is not near to."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what is known of it before it runs."""

    plan: Plan
    step_s: float
    peak_bytes: int
    budget: int
    bound_s: float
    """No plan for this profile and budget takes less."""
    greedy_s: float
    """What the best plan takes that was found without the relaxed problem."""
    prices: tuple[float, ...]
    """Seconds that one more byte would save, by the slot in which it would be free."""
    how: str
    """Where the plan is from."""

    @property
    def gap(self) -> float:
        """How much slower than the bound the plan is, as a share of it."""
        return self.step_s / self.bound_s - 1 if self.bound_s else 0.0


def make_plan(
    profile: Profile,
    budget: int,
    allowed: Allowed = Allowed(),  # noqa: B008
    *,
    barrier: bool = False,
) -> Planned:
    """Return the best plan found that keeps within ``budget`` bytes on every rank.

    Raises:
        ConfigError: There is none; with the least that is needed.
    """
    if barrier or allowed.barrier:
        return _made(profile, budget, replace(allowed, barrier=True))
    free = _made(profile, budget, allowed)
    if max(profile.parting, profile.parting * profile.straying) <= 1.0:  # a barrier only forbids
        return free
    met = make_plan(profile, budget, allowed, barrier=True)
    best = min(free, met, key=attrgetter("step_s"))
    return replace(
        best,
        bound_s=min(free.bound_s, met.bound_s),
        greedy_s=min(free.greedy_s, met.greedy_s),
    )


def _made(profile: Profile, budget: int, allowed: Allowed) -> Planned:
    """Return the best plan found, with a barrier or without one.

    Options are weighed as if no plan strayed; each plan that is built is timed as it is.
    """
    alike = profile.stretched(1.0 if allowed.barrier else profile.parting)
    # They need half a second to start, each with a core of its own if there are two.
    with Solver() as quick, Solver() as thorough, ThreadPoolExecutor(1) as aside:
        footprints = Footprints(profile)
        options = all_options(alike, allowed, footprints)
        choosing = Choosing(alike, options, footprints, allowed)
        refuse(alike, budget, choosing, footprints)
        candidates = Candidates(profile, budget, allowed, choosing)
        relaxation = Relaxation(alike, options, _groups(alike, options), allowed)
        problem = relaxation.problem(budget)
        arrays = _arrays(problem)
        solving = aside.submit(thorough.solve, arrays, whole=True, limit_s=_WHOLE_S)
        candidates.try_presets()
        candidates.try_choices("greedy", choosing.fitting(choosing.fastest(), budget))
        greedy_s = candidates.best_s
        fractions = quick.solve(arrays, whole=False, limit_s=_FRACTIONS_S)
        for chosen in _least_traffic(alike, choosing, budget, quick):
            candidates.try_choices("least traffic", chosen)
        for name, found in (("fractions", fractions), ("whole", solving.result())):
            if found is not None and found.x is not None:
                chosen = choosing.fitting(relaxation.chosen(found.x), budget)
                candidates.try_choices(name, chosen, relaxation, found.x)
    improve(candidates)
    bounds = [found.bound for found in (fractions, solving.result()) if found is not None]
    best = candidates.best
    narrow = trimmed(best.plan, profile)
    if is_sound(narrow) and candidates.step_s(narrow) <= best.step_s * (1 + 1e-9):
        best = best._replace(plan=narrow)
    return Planned(
        plan=best.plan.replace(unit_bytes=profile.unit_bytes),
        step_s=best.step_s,
        peak_bytes=footprints.peak(best.plan),
        budget=budget,
        bound_s=max([alike.compute_s, *(problem.base_s - problem.slack_s + b for b in bounds)]),
        greedy_s=greedy_s,
        prices=_by_slot(relaxation, problem, fractions, budget),
        how=best.name,
    )


def _least_traffic(
    profile: Profile, choosing: Choosing, budget: int, solver: Solver
) -> Iterator[list[Option]]:
    """Yield options that send least, with more and less room left for messages ahead of time."""
    if len(choosing.options) > _SPLIT_UNITS:
        return
    split = Split(profile, choosing)
    least = min(budget, choosing.footprints.peak(choosing.tightest(choosing.frugal())))
    for share in _SHARES:
        chosen = split.least_traffic(round(least + share * (budget - least)), solver)
        if chosen is not None:
            yield chosen


def _groups(profile: Profile, options: Sequence[tuple[Option, ...]]) -> list[range]:
    """Return groups that take about as long to compute and to carry."""
    carried = [max(option.channel_s for option in mine) for mine in options]
    computed = [unit.forward_s + unit.backward_s for unit in profile.units]
    shares = [
        link / max(sum(carried), 1e-12) + device / max(sum(computed), 1e-12)
        for link, device in zip(carried, computed, strict=True)
    ]
    return group_units(shares, _GROUPS)


def _arrays(problem: Problem) -> Arrays:
    rows = problem.rows
    return {
        "cost": problem.cost,
        "upper": problem.upper,
        "whole": problem.whole,
        "rows": np.array(rows.rows, dtype=float),
        "columns": np.array(rows.columns, dtype=float),
        "values": np.array(rows.values),
        "lower": np.array(rows.lower),
        "upper_rows": np.array(rows.upper),
        "gap": np.array([_GAP]),
    }


def _by_slot(
    relaxation: Relaxation, problem: Problem, found: Solution | None, budget: int
) -> tuple[float, ...]:
    """Return the price of a byte in each slot; of a group's, where most is kept."""
    by_slot = [0.0] * relaxation.num_slots
    if found is None:
        return tuple(by_slot)
    for interval, row in enumerate(problem.memory_rows):
        by_slot[relaxation.fullest_slot(interval)] = float(found.prices[row]) / budget
    return tuple(by_slot)
