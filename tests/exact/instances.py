"""Small problems for the planner, drawn from a seed: a profile, a budget, a barrier or none.

All times are whole multiples of a quantum, so that a solver that knows integers only is exact: a
unit is a whole multiple of what fills every rank's chunk, which the link carries in one quantum.
"""

import random
from typing import NamedTuple

from stretto.comm.shards import ALIGN
from stretto.plan.building import When, build, with_barrier
from stretto.plan.footprint import Footprints
from stretto.plan.options import Choice, unit_of
from stretto.plan.presets import Wish, named_plan, random_plan
from stretto.plan.profile import Link, Profile, UnitCost
from stretto.plan.slots import Slots
from stretto.plan.value import Message, Plan, Sharding, What

QUANTUM_S = 1e-3
_SMALLEST, _SKEW = 4, 50
"""Quanta that a message of the smallest unit takes; how many times as large the largest may be."""


class Instance(NamedTuple):
    """What a planner is asked."""

    profile: Profile
    budget: int
    barrier: bool


def draw_instance(seed: int, units: int | None = None) -> Instance:
    """Return the instance of a seed, of 1 to 6 units where their number is not told."""
    draw = random.Random(seed)
    count = draw.randint(1, 6) if units is None else units
    profile = _profile(draw, count)
    barrier = draw.random() < 0.3
    footprints = Footprints(profile)
    least = footprints.peak(frugal_plan(profile, barrier=barrier))
    most = footprints.peak(named_plan("dear", profile.shapes, Wish(barrier=barrier)))
    budget = round(least + draw.random() * max(0, most - least))
    return Instance(profile, budget, barrier)


def frugal_plan(profile: Profile, *, barrier: bool) -> Plan:
    """Return the plan that keeps least: everything is let go at once, and comes just in time."""
    kinds = [Sharding.ZERO2 if u.used_often else Sharding.ZERO3 for u in profile.units]
    units = [unit_of(profile, index, Choice(kind)) for index, kind in enumerate(kinds)]

    def timing(slots: Slots, what: What, unit: int, _block: int) -> When:
        backward, forward = slots.backward(unit), slots.forward(unit)
        if what is What.REDUCE:
            return When(backward, backward + 1, 2 * backward + 1)
        used = forward if what is What.GATHER else slots.count + backward
        return When(used, used, 2 * used)

    return build(units, timing, barrier=barrier, whole_layers=False)


def draw_plan(instance: Instance, seed: int) -> Plan:
    """Return a plan of whole units for an instance, drawn from a seed; it may not fit."""
    drawn = random_plan(instance.profile.shapes, seed)
    kinds = [unit.sharding for unit in drawn.units]
    units = [unit_of(instance.profile, index, Choice(kind)) for index, kind in enumerate(kinds)]
    first: dict[tuple[What, int], Message] = {}
    for message in drawn.messages:
        whole = message.model_copy(update={"block": 0})
        first.setdefault((message.what, message.unit), whole)
    plan = drawn.replace(units=tuple(units), messages=tuple(first.values()))
    return with_barrier(plan) if instance.barrier else plan.replace(barrier=False)


def _profile(draw: random.Random, count: int) -> Profile:
    ranks, width = draw.randint(2, 8), draw.choice([2, 4, 4])
    sizes = [round(_SMALLEST * _SKEW ** draw.random()) for _ in range(count)]
    latency = draw.randint(0, 6)
    channel = 2 * sum(size + latency for size in sizes)
    compute = channel / draw.uniform(0.3, 2.0)
    weights = [draw.uniform(0.2, 1.0) for _ in sizes]
    return Profile(
        units=tuple(
            _unit(draw, index, size * ALIGN * ranks, compute * weight / sum(weights))
            for index, (size, weight) in enumerate(zip(sizes, weights, strict=True))
        ),
        link=Link(
            ranks=ranks,
            latency_s=latency * QUANTUM_S,
            bytes_per_s=width * ALIGN * (ranks - 1) / QUANTUM_S,
        ),
        parameter_bytes=width,
        gradient_bytes=width,
        state_bytes=draw.choice([0, 4, 8]),
        update_s=round(compute * draw.uniform(0, 0.1)) * QUANTUM_S,
        source="drawn for a test",
    )


def _unit(draw: random.Random, index: int, numel: int, quanta: float) -> UnitCost:
    """Return a unit whose forward and backward take about so many quanta."""
    slower = draw.uniform(1.5, 2.5)
    forward = max(1, round(quanta / (1 + slower)))
    return UnitCost(
        name=str(index),
        numel=numel,
        forward_s=forward * QUANTUM_S,
        backward_s=max(1, round(forward * slower)) * QUANTUM_S,
        activation_bytes=round(4 * numel * draw.uniform(0, 1)),
        workspace_bytes=round(numel * draw.uniform(0, 0.5)),
        used_often=draw.random() < 0.1,
    )
