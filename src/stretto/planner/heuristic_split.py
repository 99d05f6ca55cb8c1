"""A baseline for the planner: split memory by hand between kept parameters and prefetching.

For a given share of the memory limit, first choose the options of least traffic whose just-in-time
plan fits into the share. Then widen the windows up to the whole memory limit. A small share leaves
memory for prefetching, but more units must be unsharded twice; a large share does the opposite. The
planner chooses both together, and should be at least as fast as the best share.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from stretto.planner.candidates import Candidates
from stretto.planner.check import allowed_window, required_messages
from stretto.planner.memory import PHASES_PER_SLOT, Footprints, UnitMemory, bytes_by_phase
from stretto.planner.message_windows import MessageKey, WindowWidth, fit_windows
from stretto.planner.plan import MessageKind, Plan, Slots
from stretto.planner.presets import even_block_lengths
from stretto.planner.profile import Profile
from stretto.planner.solver import Solver, SolverArrays
from stretto.planner.timing import time_plan
from stretto.planner.unit_choices import OptionAssigner, PlanConstraints, UnitOption, all_options

BytesByPhase = NDArray[np.float64]
"""Bytes at each moment of a cycle: three moments per slot."""
_MIP_GAP = 1e-6
_SOLVER_TIME_LIMIT_S = 2.0
_TIE_BREAK_SHARE = 1e-4
"""Weight of memory in the cost, as a share of all traffic: it only decides between equals."""
_TRIES_PER_PLAN = 20
"""Draws per random plan that is requested."""
_BLOCK_COUNTS = (1, 1, 2, 4)


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """The plan for one share of the memory limit."""

    share_bytes: int
    step_s: float
    plan: Plan


@dataclass(frozen=True, slots=True)
class RandomPlan:
    """A plan drawn from a seed."""

    step_s: float
    plan: Plan


def split_curve(
    profile: Profile,
    memory_limit: int,
    shares: Sequence[int],
    constraints: PlanConstraints = PlanConstraints(),  # noqa: B008
) -> list[SplitPoint]:
    """Return the plan for each of ``shares`` (bytes of ``memory_limit``) into which options fit."""
    split = LeastTrafficSplit(profile, _option_assigner(profile, constraints))
    points: list[SplitPoint] = []
    with Solver() as solver:
        for share in shares:
            selected_options = split.least_traffic(min(share, memory_limit), solver)
            if selected_options is None:
                continue
            candidates = Candidates(profile, memory_limit, constraints, split.assigner)
            candidates.try_options("split", selected_options)
            if candidates.best_step_s < float("inf"):
                best = candidates.best
                points.append(SplitPoint(share, best.step_s, best.plan))
    return points


def even_shares(
    profile: Profile,
    memory_limit: int,
    count: int,
    constraints: PlanConstraints = PlanConstraints(),  # noqa: B008
) -> list[int]:
    """Return ``count`` even shares, from the smallest that fits any plan to ``memory_limit``."""
    least = LeastTrafficSplit(profile, _option_assigner(profile, constraints)).min_share_bytes
    return [round(share) for share in np.linspace(least, max(least, memory_limit), count)]


def random_plans_within(
    profile: Profile,
    memory_limit: int,
    count: int,
    seed: int,
    constraints: PlanConstraints = PlanConstraints(),  # noqa: B008
) -> list[RandomPlan]:
    """Return up to ``count`` plans with random options, blocks and windows within ``memory_limit``.

    Units receive random options in random order as long as memory allows. Then all windows grow in
    turn towards random slots, again as long as memory allows.
    """
    split, rng = (
        LeastTrafficSplit(profile, _option_assigner(profile, constraints)),
        random.Random(seed),
    )
    if split.min_share_bytes > memory_limit:
        return []
    blocks = _BLOCK_COUNTS if constraints.blocks else (1,)
    drawn = (split.drawn(memory_limit, blocks, rng) for _ in range(_TRIES_PER_PLAN * count))
    plans = islice((plan for plan in drawn if plan is not None), count)
    return [RandomPlan(time_plan(plan, profile).step_s, plan) for plan in plans]


def _option_assigner(profile: Profile, constraints: PlanConstraints) -> OptionAssigner:
    footprints = Footprints(profile)
    return OptionAssigner(
        profile, all_options(profile, constraints, footprints), footprints, constraints
    )


class LeastTrafficSplit:
    """Finds options of least traffic within a share of memory; holds the bytes of each option."""

    def __init__(self, profile: Profile, assigner: OptionAssigner) -> None:
        self._profile, self.assigner = profile, assigner
        self._options = assigner.options
        self._option_bytes = self._bytes_by_option()

    @cached_property
    def _least_peak(self) -> list[UnitOption]:
        return self.assigner.least_peak_options()

    @property
    def min_share_bytes(self) -> int:
        """The smallest share that fits any plan, in bytes."""
        return self.assigner.footprints.peak(self.assigner.just_in_time_plan_of(self._least_peak))

    def _bytes_by_option(self) -> list[list[BytesByPhase]]:
        """Return the bytes of each option of each unit; those of a plan are the sum."""
        tables: list[list[BytesByPhase]] = [[] for _ in self._options]
        for option_index in range(max(map(len, self._options))):
            selected_options = [
                unit_options[min(option_index, len(unit_options) - 1)]
                for unit_options in self._options
            ]
            plan = self.assigner.just_in_time_plan_of(selected_options)
            for unit, option in enumerate(selected_options):
                if option_index < len(self._options[unit]):
                    tables[unit].append(_unit_bytes_by_phase(plan, unit, option))
        return tables

    def least_traffic(self, share: int, solver: Solver) -> list[UnitOption] | None:
        """Return the options of least traffic that fit into ``share`` bytes; None if none fit."""
        found = solver.solve(self._problem(share), integral=True, limit_s=_SOLVER_TIME_LIMIT_S)
        selected_options = self.assigner.fastest_options()
        if found is not None and found.x is not None:
            ends = np.cumsum([len(unit_options) for unit_options in self._options])[:-1]
            picked = [int(np.argmax(part)) for part in np.split(found.x, ends)]
            selected_options = [
                unit_options[option_index]
                for unit_options, option_index in zip(self._options, picked, strict=True)
            ]
        # The solver's tolerance may exceed the share by a few bytes: repair that.
        return self.assigner.try_fit_to_memory(selected_options, share)

    def _problem(self, share: int) -> SolverArrays:
        """Return the MILP: each unit takes one option, no moment keeps more than ``share``."""
        flat_options = [option for unit_options in self._options for option in unit_options]
        kept = np.array([table for unit_options in self._option_bytes for table in unit_options]).T
        unit_of_column = np.repeat(
            np.arange(len(self._options)), [len(unit_options) for unit_options in self._options]
        )
        one_each = (unit_of_column == np.arange(len(self._options))[:, None]).astype(float)
        left = 1 - self._profile.other_bytes / share
        matrix = np.vstack([one_each, kept / share])
        rows, columns = np.nonzero(matrix)
        units, times = len(one_each), len(kept)
        return {
            "cost": _option_costs(flat_options, kept),
            "upper": np.ones(len(flat_options)),
            "integral": np.ones(len(flat_options)),
            "rows": rows.astype(float),
            "columns": columns.astype(float),
            "values": matrix[rows, columns],
            "lower": np.array([1.0] * units + [-np.inf] * times),
            "upper_rows": np.array([1.0] * units + [left] * times),
            "gap": np.array([_MIP_GAP]),
        }

    def drawn(self, memory_limit: int, blocks: Sequence[int], rng: random.Random) -> Plan | None:
        """Return a random plan; None if the padding of its blocks exceeds the limit."""
        selected_options = self._draw_options(memory_limit, rng)
        block_lengths = [
            even_block_lengths(unit.numel, -(-unit.numel // rng.choice(blocks)))
            for unit in self._profile.units
        ]
        tight = self.assigner.just_in_time_plan_of(selected_options, block_lengths)
        window_width = WindowWidth(0, 0, dict(_draw_window_targets(tight, rng)))
        return fit_windows(tight.units, self.assigner.footprints, memory_limit, window_width, tight)

    def _draw_options(self, memory_limit: int, rng: random.Random) -> list[UnitOption]:
        pairs = zip(self._options, self._least_peak, strict=True)
        option_indices = [unit_options.index(option) for unit_options, option in pairs]
        kept = sum(
            unit_options[option_index]
            for unit_options, option_index in zip(self._option_bytes, option_indices, strict=True)
        )
        for unit in rng.sample(range(len(option_indices)), len(option_indices)):
            option_index = rng.randrange(len(self._options[unit]))
            more = (
                kept
                + self._option_bytes[unit][option_index]
                - self._option_bytes[unit][option_indices[unit]]
            )
            if np.max(more) + self._profile.other_bytes <= memory_limit:
                option_indices[unit], kept = option_index, more
        return [
            unit_options[option_index]
            for unit_options, option_index in zip(self._options, option_indices, strict=True)
        ]


def _unit_bytes_by_phase(plan: Plan, unit: int, option: UnitOption) -> BytesByPhase:
    """Return the bytes of one unit at each moment: states, messages, activations."""
    nothing = UnitMemory(0, 0, 0, (), (), updates_in_place=False)
    unit_memory = [
        option.unit_memory if index == unit else nothing for index in range(len(plan.units))
    ]
    unit_plan = plan.replace(messages=tuple(m for m in plan.messages if m.unit == unit))
    more = np.repeat(_activation_bytes_by_slot(option, unit, plan.slots), PHASES_PER_SLOT)
    return np.array(bytes_by_phase(unit_plan, unit_memory), dtype=float) + more


def _activation_bytes_by_slot(option: UnitOption, unit: int, slots: Slots) -> BytesByPhase:
    """Return the bytes of one unit's activations and workspace in each slot."""
    forward, backward = slots.forward(unit), slots.backward(unit)
    kept = np.zeros(slots.count)
    kept[forward:] = kept[: backward + 1] = option.saved_activation_bytes
    kept[[forward, backward]] += option.running_extra_bytes
    return kept


def _option_costs(options: Sequence[UnitOption], kept: BytesByPhase) -> BytesByPhase:
    """Return each option's link and recompute seconds, plus a small cost for its mean memory.

    The small cost decides between equals. A unit that is used late keeps whole parameters for a
    shorter time, so it is preferred for keeping them.
    """
    link_and_compute_s = np.array([option.link_s + option.recompute_s for option in options])
    mean: BytesByPhase = kept.mean(axis=0)
    tie = _TIE_BREAK_SHARE * float(link_and_compute_s.sum()) / max(float(mean.sum()), 1.0)
    return link_and_compute_s + tie * mean


def _draw_window_targets(plan: Plan, rng: random.Random) -> Iterator[tuple[MessageKey, int]]:
    """Yield a random gate for each unshard and a random due slot for each reduction."""
    for what, unit, block in required_messages(plan):
        first, last = allowed_window(plan, what, unit)
        if what is MessageKind.REDUCE:
            first += 1
        yield (what, unit, block), rng.randint(first, last)
