"""What a step of a plan takes on a profile, slot by slot and message by message."""

from dataclasses import dataclass

from stretto.plan.clock import Clock, Stretch
from stretto.plan.pace import Pace
from stretto.plan.presets import Shape
from stretto.plan.profile import Profile, check_same_units
from stretto.plan.value import Plan

_CYCLES = 64
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Timed:
    """One step of a run that has long begun."""

    step_s: float
    slots: tuple[Stretch, ...]
    """When each slot ran, without what it waited for."""
    messages: tuple[Stretch, ...]
    """When the link was busy with each message, in the order of the plan; the last ones may be
    carried only in the backward that follows."""

    @property
    def waited_s(self) -> float:
        """How long the computation stood still."""
        return self.step_s - sum(slot.end_s - slot.start_s for slot in self.slots)


def time_plan(plan: Plan, profile: Profile) -> Timed:
    """Return what a step of ``plan`` takes once steps are alike.

    Raises:
        ConfigError: The profile is one of another model.
    """
    shapes = [Shape(unit.name, unit.numel) for unit in plan.units]
    check_same_units(profile, shapes, "this")
    profile = profile.run_by(plan)
    clock = (Pace if profile.link.lanes == 1 else Clock)(plan, profile)
    before_s = 0.0
    for _ in range(_CYCLES):
        cycle = clock.run_cycle()
        if abs(cycle.step_s - before_s) <= _SAME * cycle.step_s:
            break
        before_s = cycle.step_s
    return Timed(cycle.step_s, tuple(cycle.slots), tuple(cycle.messages))
