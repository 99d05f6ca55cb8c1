"""What a plan keeps on one rank of a profile, slot by slot: states, travel, activations."""

from dataclasses import replace

from stretto.comm.shards import ALIGN, lay_unit
from stretto.plan.memory import MOMENTS, Holding, holding, moments, worst_curve
from stretto.plan.profile import Profile
from stretto.plan.value import Plan, Unit


class Footprints:
    """The memory of plans for one profile; what units hold is worked out once."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._known: dict[tuple[object, ...], Holding] = {}

    def curve(self, plan: Plan) -> list[int]:
        """Return, for each slot, the most bytes that a rank may keep in it."""
        states = worst_curve(plan, self.holdings(plan))
        return [state + more for state, more in zip(states, self.activations(plan), strict=True)]

    def peak(self, plan: Plan) -> int:
        """Return the most bytes that a rank may keep at once."""
        return max(self.curve(plan))

    def parts(self, plan: Plan) -> dict[str, list[int]]:
        """Return the curve by what it is made of, at the moment at which each slot has most.

        Own chunks that lie inside whole parameters are counted once, among what is always kept.
        """
        held = self.holdings(plan)
        whole = moments(plan, [_whole_only(one) for one in held])
        waiting = moments(plan, [_gradients_only(one) for one in held])
        most = [
            max(range(first, first + MOMENTS), key=lambda m: whole[m] + waiting[m])
            for first in range(0, len(whole), MOMENTS)
        ]
        other = self._profile.other_bytes
        always = sum(one.always for one in held) + other
        return {
            "always kept": [always] * plan.slots.count,
            "whole parameters": [whole[moment] for moment in most],
            "gradients waiting": [waiting[moment] for moment in most],
            "activations and workspace": [kept - other for kept in self.activations(plan)],
        }

    def holdings(self, plan: Plan) -> list[Holding]:
        """Return what the rank that has most keeps of each unit."""
        return [self.of_unit(i, unit, plan.barrier) for i, unit in enumerate(plan.units)]

    def of_unit(self, index: int, unit: Unit, barrier: bool) -> Holding:
        """Return what the rank that has most keeps of the unit in that place."""
        key = (index, unit.sharding, unit.blocks, unit.in_host, barrier)
        if key not in self._known:
            link, cost = self._profile.link, self._profile.units[index]
            ranks, grain = link.ranks, ALIGN
            if unit.in_host:
                ranks, grain = link.per_host, ALIGN * link.hosts
            layout = lay_unit(cost.tensors or (cost.numel,), unit.blocks, ranks, grain)
            # The first rank's chunks are filled before others'.
            held = holding(unit, layout, self._profile.widths, 0, barrier)
            self._known[key] = held.with_holes(self._profile.holes)
        return self._known[key]

    def _arriving(self, plan: Plan) -> int:
        """Return the room for what arrives, with the largest messages under way on all lanes."""
        link = self._profile.link
        if not link.copies or link.ranks == 1:
            return 0
        width = max(self._profile.gradient_bytes, self._profile.parameter_bytes)
        chunks = sorted(-(-b // link.ranks) for unit in plan.units for b in unit.blocks)
        return width * sum(chunks[-link.lanes :])

    def activations(self, plan: Plan) -> list[int]:
        """Return the bytes of each slot that are no states: what forward keeps, and workspace."""
        slots, kept = plan.slots, self._profile.other_bytes + self._arriving(plan)
        curve = [kept] * slots.count
        for index, (unit, cost) in enumerate(zip(plan.units, self._profile.units, strict=True)):
            kept += cost.input_bytes if unit.checkpoint else cost.activation_bytes
            again = max(0, cost.activation_bytes - cost.input_bytes) if unit.checkpoint else 0
            running = kept + again + cost.workspace_bytes
            curve[slots.forward(index)] = curve[slots.backward(index)] = running
        return curve


def _whole_only(held: Holding) -> Holding:
    nothing = (0,) * len(held.gradients)
    return replace(held, always=0, gradients=nothing, reduced=nothing)


def _gradients_only(held: Holding) -> Holding:
    return replace(held, always=0, gathered=0, inside=0)
