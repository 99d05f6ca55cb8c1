"""Budgets that no plan keeps within: said with the least that is needed, and what takes it."""

from stretto.errors import ConfigError
from stretto.plan.choosing import Choosing
from stretto.plan.footprint import Footprints
from stretto.plan.profile import Profile
from stretto.plan.value import Plan
from stretto.units import format_bytes


class TooLittleMemoryError(ConfigError):
    """No plan keeps within a budget."""


def refuse(profile: Profile, budget: int, choosing: Choosing, footprints: Footprints) -> None:
    """Say so if ``budget`` is too little.

    Raises:
        TooLittleMemoryError: With the least that would do.
    """
    if choosing.repaired(choosing.fastest(), budget) is not None:
        return
    plan = choosing.tightest(choosing.smallest())
    least = footprints.peak(plan)
    if least <= budget:
        return
    raise TooLittleMemoryError(
        f"no plan fits into {format_bytes(budget)}: the smallest needs {_rounded_up(least)}, "
        f"{_what_dominates(plan, profile, footprints)}"
    )


def _rounded_up(num_bytes: int) -> str:
    """Return so many bytes in words that are not less."""
    grain = 10 ** max(0, len(str(num_bytes)) - 3)
    return format_bytes(-(-num_bytes // grain) * grain)


def _what_dominates(plan: Plan, profile: Profile, footprints: Footprints) -> str:
    curve = footprints.curve(plan)
    slot = max(range(len(curve)), key=curve.__getitem__)
    always = sum(held.always for held in footprints.holdings(plan))
    activations = footprints.activations(plan)[slot] - profile.other_bytes
    travels = curve[slot] - always - activations - profile.other_bytes
    parts = {
        "activations (a smaller batch, or strategy.checkpoint)": activations,
        "chunks and optimizer state (more ranks)": always,
        "whole parameters and gradients of the unit that runs (smaller units)": travels,
        "buffers, frozen parameters, the batch, workspaces of libraries": profile.other_bytes,
    }
    most = max(parts, key=parts.__getitem__)
    return f"of which {format_bytes(parts[most])} are {most}, in {plan.slots.name(slot)}"
