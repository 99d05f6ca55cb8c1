"""Plans that keep within a budget, and the fastest of them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.plan.check import PlanError, check
from stretto.plan.choosing import Choosing
from stretto.plan.fitting import Key, Reach, Room, fit
from stretto.plan.footprint import Footprints
from stretto.plan.options import Allowed, Option
from stretto.plan.ordering import put_in_order
from stretto.plan.presets import Wish, even_blocks, named_plan
from stretto.plan.profile import Profile
from stretto.plan.relaxed import Flow, Relaxation
from stretto.plan.timing import time_plan
from stretto.plan.value import Plan, What

FAR = 1 << 20
_REACHES = ((2, 1), (FAR, FAR), (1, 1), (4, 2), (1, 0), (8, 4), (2, 2))
"""Slots ahead and pending; what is worth most stands first."""
_PARTS = 64
"""A block takes the link no longer than such a part of the computation, if latency allows it."""
_MOST_BLOCKS = 16
_EFFORT = 5000
"""Messages that may be put in order for each set of options, and as many for what follows: fewer
plans are tried of a model with many units."""


class Candidate(NamedTuple):
    """A plan that was timed."""

    name: str
    plan: Plan
    step_s: float
    chosen: tuple[Option, ...] = ()
    fine: bool = False
    reach: Reach = Reach(FAR, FAR)


class Candidates:
    """Those tried for one profile and budget."""

    def __init__(
        self, profile: Profile, budget: int, allowed: Allowed, footprints: Footprints
    ) -> None:
        self._profile, self._budget = profile, budget
        self._allowed, self._footprints = allowed, footprints
        self._best: Candidate | None = None
        self._tried = 0

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
        shapes, allowed = self._profile.shapes, self._allowed
        for name in ("ddp", "dear", "zero2", "zero3"):
            for prefetch in (None,) if name in ("ddp", "dear") else (1, 2, None):
                for pending in (1, None):
                    wish = Wish(
                        prefetch,
                        pending,
                        barrier=allowed.barrier,
                        whole_layers=allowed.whole_layers,
                    )
                    plan = named_plan(name, shapes, wish)
                    used = {unit.sharding for unit in plan.units}
                    if used <= set(allowed.shardings) and self._fits(plan):
                        self._offer(Candidate(name, plan, time_plan(plan, self._profile).step_s))

    def _fits(self, plan: Plan) -> bool:
        return self._footprints.peak(plan) <= self._budget

    def _offer(self, candidate: Candidate) -> bool:
        self._tried += 1
        better = candidate.step_s < self.best_s * (1 - 1e-9)
        if better:
            self._best = candidate
        return better

    def try_choices(
        self,
        name: str,
        chosen: Sequence[Option] | None,
        choosing: Choosing,
        relaxation: Relaxation | None = None,
        x: NDArray[np.float64] | None = None,
    ) -> None:
        """Try plans of these options: coarse and fine, with windows from narrow to wide."""
        if chosen is None:
            return
        cuts = {fine: self._cuts(chosen, fine) for fine in (False, True)}
        if cuts[False] == cuts[True] or not self._allowed.blocks:
            del cuts[True]
        for fine, cut in cuts.items():
            reaches = [Reach(ahead, pending) for ahead, pending in _REACHES]
            if relaxation is not None and x is not None:
                reaches.insert(0, Reach(FAR, FAR, _targets(relaxation, x, cut)))
            num_messages = 3 * sum(map(len, cut))
            for reach in reaches[: max(2, _EFFORT // num_messages)]:
                self._try(name, tuple(chosen), fine, reach, choosing)

    def _try(
        self, name: str, chosen: tuple[Option, ...], fine: bool, reach: Reach, choosing: Choosing
    ) -> bool:
        tight = choosing.tightest(chosen, self._cuts(chosen, fine))
        plan = fit(tight.units, self._footprints, self._budget, reach, tight)
        plan = put_in_order(plan, self._profile) if plan is not None else None
        if plan is None:
            return False
        try:
            check(plan)
        except PlanError:
            return False
        plan = self._widest(plan)
        step_s = time_plan(plan, self._profile).step_s
        return self._offer(Candidate(name, plan, step_s, chosen, fine, reach))

    def _widest(self, plan: Plan) -> Plan:
        """Return ``plan`` with every window as wide as there is room, which slows nobody."""
        room = Room(plan, self._footprints, self._budget)
        room.widen(Reach(FAR, FAR))
        wide = room.widened()
        try:
            check(wide)
        except PlanError:
            return plan
        return wide

    def _cuts(self, chosen: Sequence[Option], fine: bool) -> list[tuple[int, ...]]:
        profile = self._profile
        piece_s = max(10 * profile.link.latency_s, profile.compute_s / _PARTS)
        cuts: list[tuple[int, ...]] = []
        for option, unit in zip(chosen, profile.units, strict=True):
            most_s = max(option.reduce_s, option.gather_s)
            parts = min(_MOST_BLOCKS, unit.numel, round(most_s / piece_s)) if fine else 1
            cuts.append(even_blocks(unit.numel, -(-unit.numel // max(parts, 1))))
        return cuts

    def improve(self, choosing: Choosing) -> None:
        """Change the best bit by bit as long as that helps."""
        left = _EFFORT
        while True:
            before_s = self.best_s
            for change in (self._other_options, self._other_order):
                left = change(choosing, left)
            if left <= 0 or self.best_s > before_s * (1 - 1e-4):
                return

    def _other_options(self, choosing: Choosing, left: int) -> int:
        """Give one unit after another another option; return the effort that is left."""
        start = self.best
        if not start.chosen:
            return left
        for unit in range(len(start.chosen)):
            for option in choosing.options[unit]:
                now = self.best
                if option == now.chosen[unit] or left <= 0:
                    continue
                left -= len(now.plan.messages)
                chosen = (*now.chosen[:unit], option, *now.chosen[unit + 1 :])
                self._try(now.name, chosen, now.fine, now.reach, choosing)
        return left

    def _other_order(self, choosing: Choosing, left: int) -> int:
        """Let a message change places with the one behind it; return the effort that is left."""
        place = 0
        while place + 1 < len(self.best.plan.messages) and left > 0:
            left -= len(self.best.plan.messages)
            now = self.best
            messages = list(now.plan.messages)
            messages[place : place + 2] = messages[place + 1], messages[place]
            plan = now.plan.replace(messages=tuple(messages))
            try:
                check(plan)
            except PlanError:
                place += 1
                continue
            step_s = time_plan(plan, self._profile).step_s
            self._offer(now._replace(plan=plan, step_s=step_s))
            place += 1
        return left


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
