"""Memory split by hand: so much for keeping parameters, the rest for messages ahead of time.

What the planner is compared with. First the options are chosen that send least and fit into a share
of the budget, all of it just in time; then windows are widened under the whole budget. A small
share leaves room to gather ahead, but much must be gathered twice; with a large one it is the other
way round. The planner chooses both at once, and should be as good as the best share.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from stretto.plan.candidates import Candidates
from stretto.plan.check import needed, window
from stretto.plan.choosing import Choosing
from stretto.plan.fitting import Key, Reach, fit
from stretto.plan.footprint import Footprints
from stretto.plan.memory import MOMENTS, Holding, moments
from stretto.plan.options import Allowed, Option, all_options
from stretto.plan.presets import even_blocks
from stretto.plan.profile import Profile
from stretto.plan.slots import Slots
from stretto.plan.solving import Arrays, Solver
from stretto.plan.timing import time_plan
from stretto.plan.value import Plan, What

Bytes = NDArray[np.float64]
"""By moment of a cycle."""
_GAP = 1e-6
_LIMIT_S = 2.0
_TIE = 1e-4
"""What share of all traffic keeping everything may weigh: of equals, the one that keeps less."""
_TRIES = 20
"""For each random plan that is asked for."""
_BLOCKS = (1, 1, 2, 4)


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """The plan of one share."""

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
    budget: int,
    shares: Sequence[int],
    allowed: Allowed = Allowed(),  # noqa: B008
) -> list[SplitPoint]:
    """Return the plan of each share of ``budget``; shares into which nothing fits are left out."""
    split = Split(profile, _choosing(profile, allowed))
    points: list[SplitPoint] = []
    with Solver() as solver:
        for share in shares:
            chosen = split.least_traffic(min(share, budget), solver)
            if chosen is None:
                continue
            candidates = Candidates(profile, budget, allowed, split.choosing)
            candidates.try_choices("split", chosen)
            if candidates.best_s < float("inf"):
                best = candidates.best
                points.append(SplitPoint(share, best.step_s, best.plan))
    return points


def even_shares(
    profile: Profile,
    budget: int,
    count: int,
    allowed: Allowed = Allowed(),  # noqa: B008
) -> list[int]:
    """Return ``count`` shares of ``budget``, from the least into which something fits to all."""
    least = Split(profile, _choosing(profile, allowed)).least_bytes
    return [round(share) for share in np.linspace(least, max(least, budget), count)]


def random_candidates(
    profile: Profile,
    budget: int,
    count: int,
    seed: int,
    allowed: Allowed = Allowed(),  # noqa: B008
) -> list[RandomPlan]:
    """Return plans within ``budget`` of random options, blocks and windows: ``count`` or fewer.

    Units in random order are given random options, as long as there is room. Then windows grow, all
    in turn, towards random slots, again as long as there is room.
    """
    split, draw = Split(profile, _choosing(profile, allowed)), random.Random(seed)
    if split.least_bytes > budget:
        return []
    blocks = _BLOCKS if allowed.blocks else (1,)
    drawn = (split.drawn(budget, blocks, draw) for _ in range(_TRIES * count))
    plans = islice((plan for plan in drawn if plan is not None), count)
    return [RandomPlan(time_plan(plan, profile).step_s, plan) for plan in plans]


def _choosing(profile: Profile, allowed: Allowed) -> Choosing:
    footprints = Footprints(profile)
    return Choosing(profile, all_options(profile, allowed, footprints), footprints, allowed)


class Split:
    """The options of a profile, with what each keeps at every moment when all is just in time."""

    def __init__(self, profile: Profile, choosing: Choosing) -> None:
        self._profile, self.choosing = profile, choosing
        self._options = choosing.options
        self._kept = self._tables()

    @cached_property
    def _smallest(self) -> list[Option]:
        return self.choosing.smallest()

    @property
    def least_bytes(self) -> int:
        """The smallest share into which something fits."""
        return self.choosing.footprints.peak(self.choosing.tightest(self._smallest))

    def _tables(self) -> list[list[Bytes]]:
        """Return the bytes of each option of each unit; a plan keeps the sum of its options'."""
        tables: list[list[Bytes]] = [[] for _ in self._options]
        for place in range(max(map(len, self._options))):
            chosen = [mine[min(place, len(mine) - 1)] for mine in self._options]
            plan = self.choosing.tightest(chosen)
            for unit, option in enumerate(chosen):
                if place < len(self._options[unit]):
                    tables[unit].append(_alone(plan, unit, option))
        return tables

    def least_traffic(self, share: int, solver: Solver) -> list[Option] | None:
        """Return the options that send least among those that fit into ``share``."""
        found = solver.solve(self._problem(share), whole=True, limit_s=_LIMIT_S)
        chosen = self.choosing.fastest()
        if found is not None and found.x is not None:
            ends = np.cumsum([len(mine) for mine in self._options])[:-1]
            picked = [int(np.argmax(part)) for part in np.split(found.x, ends)]
            chosen = [mine[place] for mine, place in zip(self._options, picked, strict=True)]
        # To the solver a few bytes too many are nothing.
        return self.choosing.repaired(chosen, share)

    def _problem(self, share: int) -> Arrays:
        """Return: each unit takes one option, no moment keeps more than ``share``."""
        flat = [option for mine in self._options for option in mine]
        kept = np.array([table for mine in self._kept for table in mine]).T
        owner = np.repeat(np.arange(len(self._options)), [len(mine) for mine in self._options])
        one_each = (owner == np.arange(len(self._options))[:, None]).astype(float)
        left = 1 - self._profile.other_bytes / share
        matrix = np.vstack([one_each, kept / share])
        rows, columns = np.nonzero(matrix)
        units, times = len(one_each), len(kept)
        return {
            "cost": _costs(flat, kept),
            "upper": np.ones(len(flat)),
            "whole": np.ones(len(flat)),
            "rows": rows.astype(float),
            "columns": columns.astype(float),
            "values": matrix[rows, columns],
            "lower": np.array([1.0] * units + [-np.inf] * times),
            "upper_rows": np.array([1.0] * units + [left] * times),
            "gap": np.array([_GAP]),
        }

    def drawn(self, budget: int, blocks: Sequence[int], draw: random.Random) -> Plan | None:
        """Return a random plan; None if its blocks, which are padded, are too much."""
        chosen = self._drawn_options(budget, draw)
        cuts = [
            even_blocks(unit.numel, -(-unit.numel // draw.choice(blocks)))
            for unit in self._profile.units
        ]
        tight = self.choosing.tightest(chosen, cuts)
        reach = Reach(0, 0, dict(_drawn_slots(tight, draw)))
        return fit(tight.units, self.choosing.footprints, budget, reach, tight)

    def _drawn_options(self, budget: int, draw: random.Random) -> list[Option]:
        pairs = zip(self._options, self._smallest, strict=True)
        places = [mine.index(option) for mine, option in pairs]
        kept = sum(mine[place] for mine, place in zip(self._kept, places, strict=True))
        for unit in draw.sample(range(len(places)), len(places)):
            place = draw.randrange(len(self._options[unit]))
            more = kept + self._kept[unit][place] - self._kept[unit][places[unit]]
            if np.max(more) + self._profile.other_bytes <= budget:
                places[unit], kept = place, more
        return [mine[place] for mine, place in zip(self._options, places, strict=True)]


def _alone(plan: Plan, unit: int, option: Option) -> Bytes:
    """Return what one unit of ``plan`` keeps at each moment: states, travel, activations."""
    nothing = Holding(0, 0, 0, (), (), in_place=False)
    held = [option.held if index == unit else nothing for index in range(len(plan.units))]
    own = plan.replace(messages=tuple(m for m in plan.messages if m.unit == unit))
    more = np.repeat(_activations(option, unit, plan.slots), MOMENTS)
    return np.array(moments(own, held), dtype=float) + more


def _activations(option: Option, unit: int, slots: Slots) -> Bytes:
    """Return what one unit adds to what forward keeps and computation needs, by slot."""
    forward, backward = slots.forward(unit), slots.backward(unit)
    kept = np.zeros(slots.count)
    kept[forward:] = kept[: backward + 1] = option.kept_bytes
    kept[[forward, backward]] += option.running_bytes
    return kept


def _costs(options: Sequence[Option], kept: Bytes) -> Bytes:
    """Return what each option asks of the link and the device; of equals, less for less kept.

    A unit that is used late keeps whole parameters for a shorter time: it comes first to keep them.
    """
    asked = np.array([option.channel_s + option.again_s for option in options])
    mean: Bytes = kept.mean(axis=0)
    tie = _TIE * float(asked.sum()) / max(float(mean.sum()), 1.0)
    return asked + tie * mean


def _drawn_slots(plan: Plan, draw: random.Random) -> Iterator[tuple[Key, int]]:
    """Yield a random gate for each gather, a random due for each reduction."""
    for what, unit, block in needed(plan):
        first, last = window(plan, what, unit)
        if what is What.REDUCE:
            first += 1
        yield (what, unit, block), draw.randint(first, last)
