"""Plans that keep within a budget, and the fastest of them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.plan.check import PlanError, check
from stretto.plan.choosing import Choosing
from stretto.plan.fitting import Key, Reach, Room, fit
from stretto.plan.options import Allowed, Choice, Option, option_of
from stretto.plan.ordering import put_in_order
from stretto.plan.presets import Wish, even_blocks, named_plan
from stretto.plan.profile import Profile
from stretto.plan.relaxed import Flow, Relaxation
from stretto.plan.timing import time_plan
from stretto.plan.value import Plan, What

FAR = 1 << 20
_REACHES = ((2, 1), (FAR, FAR), (1, 1), (4, 2), (1, 0), (8, 4), (2, 2))
"""Slots ahead and pending; what is worth most stands first."""
_PRESETS = [
    (name, prefetch, pending, barrier)
    for name in ("ddp", "dear", "zero2", "zero3")
    for prefetch in ((None,) if name in ("ddp", "dear") else (1, 2, None))
    for pending in (1, None)
    for barrier in (False, True)
]
_PARTS = 64
"""A block takes the link no longer than such a part of the computation, if latency allows it."""
_MOST_BLOCKS = 16
_EFFORT = 500
"""Messages that may be put in order for each set of options: fewer windows are tried of a model
with many units."""
_CUT = 1.01
"""How many times as long a plan counts whose units are cut."""
_HURRY = 1.03
"""And one whose gathers have no time to be late, where ranks are."""
_NEAR = 1.03
"""Only a plan that takes no longer than so many times the best is worth wider windows."""


class Attempt(NamedTuple):
    """What a plan is built from."""

    name: str
    chosen: tuple[Option, ...]
    fine: bool
    """Whether units travel in blocks."""
    reach: Reach


class Candidate(NamedTuple):
    """A plan that was timed."""

    name: str
    plan: Plan
    step_s: float
    chosen: tuple[Option, ...]
    fine: bool = False
    reach: Reach = Reach(FAR, FAR)


def is_sound(plan: Plan) -> bool:
    """Say whether a plan can be carried out."""
    try:
        check(plan)
    except PlanError:
        return False
    return True


class Candidates:
    """Those tried for one profile and budget."""

    def __init__(self, profile: Profile, budget: int, allowed: Allowed, choosing: Choosing) -> None:
        self.profile, self._budget = profile, budget
        self._allowed, self.choosing = allowed, choosing
        self._footprints = choosing.footprints
        self._best: Candidate | None = None

    @property
    def best(self) -> Candidate:
        """The fastest so far."""
        assert self._best is not None
        return self._best

    @property
    def best_s(self) -> float:
        """What a step of it takes."""
        return self._best.step_s if self._best is not None else float("inf")

    def try_presets(self) -> None:
        """Try the plans that people know by name, where they fit and are allowed."""
        shapes, allowed = self.profile.shapes, self._allowed
        for name, prefetch, pending, barrier in _PRESETS:
            if allowed.barrier and not barrier:
                continue
            wish = Wish(prefetch, pending, barrier=barrier, whole_layers=allowed.whole_layers)
            # Whoever need not wait for all gradients may still have the order of one who does.
            plan = named_plan(name, shapes, wish).replace(barrier=allowed.barrier)
            used = {unit.sharding for unit in plan.units}
            if used <= set(allowed.shardings) and self._fits(plan):
                self.offer(Candidate(name, plan, self.step_s(plan), self._options_of(plan)))

    def _options_of(self, plan: Plan) -> tuple[Option, ...]:
        return tuple(
            option_of(
                self.profile,
                index,
                Choice(unit.sharding, unit.checkpoint, unit.in_host),
                self._footprints,
                barrier=plan.barrier,
            )
            for index, unit in enumerate(plan.units)
        )

    def _fits(self, plan: Plan) -> bool:
        return self._footprints.peak(plan) <= self._budget

    def offer(self, candidate: Candidate) -> bool:
        """Take a candidate that fits, if it is better than the best."""
        now = self._best
        better = now is None or self._weight(candidate) < self._weight(now) * (1 - 1e-9)
        if better:
            self._best = candidate
        return better

    def _weight(self, candidate: Candidate) -> float:
        """Return a candidate's time, a little more where units travel in blocks, or in a hurry.

        Every message costs more than its time on the link: a plan of many must be worth it. Where
        ranks were seen to be unequal, one that has a slot to spare is as good as a faster one.
        """
        weight = candidate.step_s
        if any(len(unit.blocks) > 1 for unit in candidate.plan.units):
            weight *= _CUT
        if self.profile.is_uneven and candidate.plan.hurries:
            weight *= _HURRY
        return weight

    def try_choices(
        self,
        name: str,
        chosen: Sequence[Option],
        relaxation: Relaxation | None = None,
        x: NDArray[np.float64] | None = None,
    ) -> None:
        """Try plans of these options: coarse and fine, with windows from narrow to wide."""
        cuts = {fine: self._cuts(chosen, fine) for fine in (False, True)}
        if cuts[False] == cuts[True] or not self._allowed.blocks:
            del cuts[True]
        for fine, cut in cuts.items():
            reaches = [Reach(ahead, pending) for ahead, pending in _REACHES]
            if relaxation is not None and x is not None:
                reaches.insert(0, Reach(FAR, FAR, _targets(relaxation, x, cut)))
            num_messages = 3 * sum(map(len, cut))
            for reach in reaches[: max(3, _EFFORT // num_messages)]:
                self.attempt(Attempt(name, tuple(chosen), fine, reach))

    def attempt(self, attempt: Attempt) -> bool:
        """Build a plan and time it; say whether it is the best now."""
        tight = self.choosing.tightest(attempt.chosen, self._cuts(attempt.chosen, attempt.fine))
        plan = fit(tight.units, self._footprints, self._budget, attempt.reach, tight)
        plan = put_in_order(plan, self.profile) if plan is not None else None
        if plan is None or not is_sound(plan):
            return False
        step_s = self.step_s(plan)
        if step_s < _NEAR * self.best_s:
            plan = self._widest(plan)
            step_s = self.step_s(plan)
        return self.offer(Candidate(attempt.name, plan, step_s, *attempt[1:]))

    def step_s(self, plan: Plan) -> float:
        """Return what a step of ``plan`` takes."""
        return time_plan(plan, self.profile).step_s

    def _widest(self, plan: Plan) -> Plan:
        """Return ``plan`` with every window as wide as there is room, which slows nobody."""
        room = Room(plan, self._footprints, self._budget)
        room.widen(Reach(FAR, FAR))
        wide = room.widened()
        return wide if is_sound(wide) else plan

    def _cuts(self, chosen: Sequence[Option], fine: bool) -> list[tuple[int, ...]]:
        profile = self.profile
        piece_s = max(10 * profile.link.latency_s, profile.compute_s / _PARTS)
        cuts: list[tuple[int, ...]] = []
        for option, unit in zip(chosen, profile.units, strict=True):
            most_s = max(option.reduce_s, option.gather_s)
            parts = min(_MOST_BLOCKS, unit.numel, round(most_s / piece_s)) if fine else 1
            cuts.append(even_blocks(unit.numel, -(-unit.numel // max(parts, 1))))
        return cuts


def _targets(
    relaxation: Relaxation, x: NDArray[np.float64], cuts: Sequence[Sequence[int]]
) -> dict[Key, int]:
    """Return gates and dues where a relaxed solution begins to gather, and has reduced."""
    targets: dict[Key, int] = {}
    for group, units in enumerate(relaxation.groups):
        for flow, what in ((Flow.COME, What.GATHER), (Flow.AGAIN, What.REGATHER)):
            shares = relaxation.flow(x, flow, group)
            first = next((t for t, share in shares.items() if share > 0.01), None)
            if first is not None:
                slot = relaxation.first_slot(first)
                targets.update({(what, unit, 0): slot for unit in units})
        shares = relaxation.flow(x, Flow.REDUCE, group)
        for unit in units if shares else ():
            count = len(cuts[unit])
            for block in range(count):
                done = next(t for t, s in shares.items() if s >= (block + 1) / count - 1e-3)
                targets[What.REDUCE, unit, block] = relaxation.last_slot(done) + 1
    return targets
