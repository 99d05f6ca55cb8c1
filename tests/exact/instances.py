"""Small random problems for the planner: a profile, a memory limit, with or without a barrier.

All times are whole multiples of a quantum, so that an integer solver is exact. To this end, the
size of a unit is a multiple of the bytes that the link carries in one quantum.
"""

import random
from typing import NamedTuple

from stretto.comm.shard_layout import ALIGN
from stretto.planner.memory import Footprints
from stretto.planner.plan import MessageKind, Plan, PlanMessage, Sharding, Slots
from stretto.planner.presets import (
    MessageTiming,
    PresetOptions,
    add_barrier,
    build_plan,
    preset_plan,
    random_plan,
)
from stretto.planner.profile import Link, Profile, UnitCost
from stretto.planner.unit_choices import UnitChoice, make_unit

QUANTUM_S = 1e-3
_SMALLEST, _SKEW = 4, 50
"""Quanta of a message of the smallest unit; size of the largest unit, relative to the smallest."""


class Instance(NamedTuple):
    """A problem of the planner."""

    profile: Profile
    memory_limit: int
    barrier: bool


def draw_instance(seed: int, units: int | None = None) -> Instance:
    """Return the instance of ``seed``, with 1 to 6 units if ``units`` is None."""
    draw = random.Random(seed)
    count = draw.randint(1, 6) if units is None else units
    profile = _profile(draw, count)
    barrier = draw.random() < 0.3
    footprints = Footprints(profile)
    least = footprints.peak(frugal_plan(profile, barrier=barrier))
    most = footprints.peak(preset_plan("dear", profile.shapes, PresetOptions(barrier=barrier)))
    memory_limit = round(least + draw.random() * max(0, most - least))
    return Instance(profile, memory_limit, barrier)


def frugal_plan(profile: Profile, *, barrier: bool) -> Plan:
    """Return the plan of least memory: reshard at once, and unshard just in time."""
    kinds = [Sharding.ZERO2 if u.used_often else Sharding.ZERO3 for u in profile.units]
    units = [make_unit(profile, index, UnitChoice(kind)) for index, kind in enumerate(kinds)]

    def timing(slots: Slots, what: MessageKind, unit: int, _block: int) -> MessageTiming:
        backward, forward = slots.backward(unit), slots.forward(unit)
        if what is MessageKind.REDUCE:
            return MessageTiming(backward, backward + 1, 2 * backward + 1)
        used = forward if what is MessageKind.UNSHARD else slots.count + backward
        return MessageTiming(used, used, 2 * used)

    return build_plan(units, timing, barrier=barrier, whole_layers=False)


def draw_plan(instance: Instance, seed: int) -> Plan:
    """Return a random plan of whole units for an instance; it may exceed the memory limit."""
    drawn = random_plan(instance.profile.shapes, seed)
    kinds = [unit.sharding for unit in drawn.units]
    units = [
        make_unit(instance.profile, index, UnitChoice(kind)) for index, kind in enumerate(kinds)
    ]
    first: dict[tuple[MessageKind, int], PlanMessage] = {}
    for message in drawn.messages:
        whole = message.model_copy(update={"block": 0})
        first.setdefault((message.what, message.unit), whole)
    plan = drawn.replace(units=tuple(units), messages=tuple(first.values()))
    return add_barrier(plan) if instance.barrier else plan.replace(barrier=False)


def _profile(draw: random.Random, count: int) -> Profile:
    ranks, width = draw.randint(2, 8), draw.choice([2, 4, 4])
    sizes = [round(_SMALLEST * _SKEW ** draw.random()) for _ in range(count)]
    latency = draw.randint(0, 6)
    transport = 2 * sum(size + latency for size in sizes)
    compute = transport / draw.uniform(0.3, 2.0)
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
    """Return a unit whose forward and backward together take about ``quanta``."""
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
