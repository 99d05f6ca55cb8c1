"""What a plan makes every host's link carry, whatever the algorithms: the floor under its time."""

from stretto.plan.memory import Widths
from stretto.plan.value import Plan, Sharding, Unit


def link_bytes(plan: Plan, widths: Widths, hosts: int) -> float:
    """Return the bytes that one host must send, and receive, in a step of ``plan``."""
    return (hosts - 1) / hosts * sum(_travelling(unit, widths) for unit in plan.units)


def _travelling(unit: Unit, widths: Widths) -> int:
    """Return a unit's bytes, once for every time that it crosses the links."""
    if unit.in_host or unit.sharding is Sharding.DP:  # gradients alone: summed, and given to all
        return 2 * unit.numel * widths.gradient
    gathers = 2 if unit.sharding is Sharding.ZERO3 else 1
    return unit.numel * (widths.gradient + gathers * widths.parameter)
