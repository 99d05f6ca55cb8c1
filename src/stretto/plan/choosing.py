"""Choices that fit: whatever is too much for a budget is taken where it costs the link least."""

from collections.abc import Sequence

from stretto.plan.fitting import tight_plan
from stretto.plan.footprint import Footprints
from stretto.plan.options import Allowed, Option, unit_of
from stretto.plan.profile import Profile
from stretto.plan.slots import Slots
from stretto.plan.value import Plan, Sharding

_STEPS = 400
_FEW = 100
"""Units, of more of which not every option is tried."""


class Choosing:
    """The options of a profile's units under one budget."""

    def __init__(
        self,
        profile: Profile,
        options: Sequence[tuple[Option, ...]],
        footprints: Footprints,
        allowed: Allowed,
    ) -> None:
        self._profile, self.options = profile, options
        self.footprints, self._allowed = footprints, allowed

    def tightest(self, chosen: Sequence[Option], blocks: Sequence[Sequence[int]] = ()) -> Plan:
        """Return the plan of these options that keeps least."""
        cuts = blocks or [()] * len(chosen)
        units = [
            unit_of(self._profile, i, option.choice, cut)
            for i, (option, cut) in enumerate(zip(chosen, cuts, strict=True))
        ]
        allowed = self._allowed
        return tight_plan(units, barrier=allowed.barrier, whole_layers=allowed.whole_layers)

    def fastest(self) -> list[Option]:
        """Return for each unit the option that asks least of the link and the device."""
        return [min(mine, key=lambda o: o.channel_s + o.again_s) for mine in self.options]

    def frugal(self) -> list[Option]:
        """Return for each unit the option that keeps least: near to the smallest, found at once."""
        return [min(mine, key=lambda o: (o.held.always, o.kept_bytes)) for mine in self.options]

    def smallest(self) -> list[Option]:
        """Return the options that need least, as far as changing one after another can tell."""
        starts = [self.frugal(), self._lowered(self.fastest())]
        return min((self._changed(start) for start in starts), key=self._peak)

    def _peak(self, chosen: Sequence[Option]) -> int:
        return self.footprints.peak(self.tightest(chosen))

    def _changed(self, chosen: list[Option]) -> list[Option]:
        """Return options of which no single one could be changed for a smaller peak.

        Where that stays the same, for smaller ones after it: they may be in the way.
        """
        best, least = chosen, self._heights(chosen)
        better = len(chosen) <= _FEW
        while better:
            better = False
            for unit, mine in enumerate(self.options):
                for option in mine:
                    tried = [*best[:unit], option, *best[unit + 1 :]]
                    if (heights := self._heights(tried)) < least:
                        best, least, better = tried, heights, True
        return best

    def _heights(self, chosen: Sequence[Option]) -> list[int]:
        """Return what is kept in all slots, the most first."""
        return sorted(self.footprints.curve(self.tightest(chosen)), reverse=True)

    def _lowered(self, chosen: list[Option]) -> list[Option]:
        """Return options with as low a peak as `repaired` can reach."""
        now, least = chosen, self._peak(chosen)
        while True:
            tried = self.repaired(now, least - 1)
            if tried is None:
                return now
            now, least = tried, self._peak(tried)

    def fitting(self, chosen: Sequence[Option], budget: int) -> list[Option]:
        """Return options near ``chosen`` that fit into ``budget``, or the smallest ones."""
        return self.repaired(chosen, budget) or self.smallest()

    def repaired(self, chosen: Sequence[Option], budget: int) -> list[Option] | None:
        """Return options near ``chosen`` that fit into ``budget``; None if none were found."""
        now = list(chosen)
        for _ in range(_STEPS):
            curve = self.footprints.curve(self.tightest(now))
            slot = max(range(len(curve)), key=curve.__getitem__)
            excess = curve[slot] - budget
            if excess <= 0:
                return now
            better = self._relieve(now, slot, excess)
            if better is None:
                return None
            now = better
        return None

    def _relieve(self, chosen: list[Option], slot: int, excess: int) -> list[Option] | None:
        """Return options that keep less in ``slot``, at the least cost a byte."""
        slots = Slots(len(chosen))
        swaps: list[tuple[float, int, int, Option]] = []
        for unit, (option, mine) in enumerate(zip(chosen, self.options, strict=True)):
            before = kept_in(option, unit, slot, slots)
            for other in mine:
                saved = before - kept_in(other, unit, slot, slots)
                if saved > 0:
                    more_s = other.channel_s + other.again_s - option.channel_s - option.again_s
                    swaps.append((more_s / saved, -saved, unit, other))
        if not swaps:
            return None
        swaps.sort(key=lambda swap: swap[:3])
        changed, done = list(chosen), set[int]()
        for _, saved, unit, other in swaps:
            if excess <= 0:
                break
            if unit not in done:
                changed[unit] = other
                done.add(unit)
                excess += saved
        return changed


def kept_in(option: Option, unit: int, slot: int, slots: Slots) -> int:
    """Return what a unit keeps in a slot at least: states, parameters, gradients, activations."""
    forward, backward = slots.forward(unit), slots.backward(unit)
    kept = option.held.always
    live = slot >= forward or slot <= backward
    if live:
        kept += option.kept_bytes
    if slot in (forward, backward):
        kept += option.running_bytes + option.held.gathered
    elif live and option.choice.sharding is Sharding.ZERO2:
        kept += option.held.gathered - option.held.inside
    if slot in (backward, backward + 1):
        kept += option.gradient_bytes
    return kept
