"""A rank's computation as a line: where on it each gradient is there, and each parameter is used.

The line of a step begins with its last backward and ends with the forwards before the next one:
backward, update, then forward (and backward) of the next step's micro-batches. What a unit takes is
known; inside it, parameters are taken to be as far along as they have elements.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stretto.plan.profile import Profile
from stretto.plan.units import ModelUnit


@dataclass(frozen=True, slots=True)
class Line:
    """One step of a rank, without messages; seconds from the start of its last backward."""

    backward_s: float
    update_s: float
    step_s: float
    """The whole of it."""
    ready_s: Mapping[str, float]
    """When a parameter's gradient is there, by name."""
    used_s: Mapping[str, float]
    """When a parameter is used, since the next forward began."""
    slowdown: float = 1.0
    """How many times as long it takes while messages travel."""

    @property
    def forward_at_s(self) -> float:
        """When the next step's forward begins."""
        return self.backward_s + self.update_s

    def ready(self, names: Iterable[str]) -> float:
        """Return when all of them have their gradients."""
        return max(self.ready_s[name] for name in names)

    def used(self, names: Iterable[str]) -> float:
        """Return when the first of them is used."""
        return self.forward_at_s + min(self.used_s[name] for name in names)


def line_of(profile: Profile, units: Sequence[ModelUnit], pieces: int, longer: float) -> Line:
    """Return the line of a profile whose units are ``units``, in so many micro-batches.

    Everything takes ``longer`` times as long as the profile says.
    """
    ready_s, used_s = dict[str, float](), dict[str, float]()
    forward_s = 0.0
    for cost, unit in zip(profile.units, units, strict=True):
        for name, share in _shares(unit):
            used_s[name] = longer * (forward_s + cost.forward_s * share)
        forward_s += cost.forward_s
    backward_s = 0.0
    for cost, unit in zip(profile.units[::-1], units[::-1], strict=True):
        for name, share in _shares(unit):
            ready_s[name] = longer * (backward_s + cost.backward_s * (1 - share))
        backward_s += cost.backward_s
    whole_s = pieces * (forward_s + backward_s) + profile.update_s
    return Line(
        longer * backward_s,
        longer * profile.update_s,
        longer * whole_s,
        ready_s,
        used_s,
        profile.slowdown,
    )


def _shares(unit: ModelUnit) -> list[tuple[str, float]]:
    """Return for each parameter which share of its unit's elements lies before it."""
    before, found = 0, []
    for name, parameter in zip(unit.names, unit.parameters, strict=True):
        found.append((name, before / unit.numel))
        before += parameter.numel()
    return found
