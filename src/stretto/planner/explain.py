"""Explain a plan in words: the sharding of each unit with the reason, and the value of memory."""

from dataclasses import dataclass

from stretto.planner.memory import Footprints
from stretto.planner.plan import Plan, Sharding, Unit
from stretto.planner.planner import PlanningResult
from stretto.planner.profile import Profile
from stretto.planner.unit_choices import UnitChoice, UnitOption, bytes_in_slot, make_option
from stretto.units import format_bytes, format_s

GIB = 1 << 30
_MIN_WORTHWHILE_SHARE = 0.01
"""Memory is short if twice the memory would save at least this share of a step, by its duals."""
_NEGLIGIBLE_GAP = 5e-4
"""A plan that takes this share more than the bound, or less, is shown as one at the bound."""
HEADERS = ("unit", "bytes", "kept as", "blocks", "on the link", "why")


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    """The explanation of a plan, as text."""

    summary_line: str
    """One line with step time, bound and memory."""
    memory: str
    """One line that says where memory is short and what more of it would save."""
    rows: tuple[tuple[str, ...], ...]
    """A row for each unit, with the columns of `HEADERS`."""


def explain(planned: PlanningResult, profile: Profile) -> PlanExplanation:
    """Return the explanation of ``planned``, which was planned for ``profile``."""
    footprints, plan = Footprints(profile), planned.plan
    profile = profile.adjusted_for(plan)
    tight_slot = _tightest_slot(planned, footprints.curve(plan))
    explainer = _UnitExplainer(profile, plan, footprints, tight_slot)
    rows = tuple(explainer.row(index) for index in range(len(plan.units)))
    return PlanExplanation(summary_line(planned), _memory_line(planned, plan, tight_slot), rows)


def ms_per_gib(planned: PlanningResult) -> float:
    """Return the milliseconds of a step that one more GiB saves, according to the duals."""
    return sum(planned.duals) * GIB * 1e3


def summary_line(planned: PlanningResult) -> str:
    """Return one line with the predicted step time, the bound and the memory of a plan."""
    gain = planned.greedy_s / planned.step_s - 1
    greedy = f"; {gain:.1%} faster than without the solver" if gain > 5e-4 else ""
    barrier = "; all gradients are there before the update" if planned.plan.barrier else ""
    step, bound = format_s(planned.step_s), format_s(planned.bound_s)
    if planned.gap < _NEGLIGIBLE_GAP:
        bounded = f"a step takes {step}, and no plan can take less"
    else:
        bounded = (
            f"a step takes {step}; no plan can take less than {bound}, and this one takes "
            f"{planned.gap:.1%} more"
        )
    return (
        f"{bounded}"
        f"{greedy}{barrier}; a rank keeps "
        f"{format_bytes(planned.peak_bytes)} of {format_bytes(planned.memory_limit)}"
    )


def _tightest_slot(planned: PlanningResult, curve: list[int]) -> int:
    """Return the slot with the largest dual value, or the fullest slot if memory is not short."""
    duals = planned.duals
    if _is_memory_short(planned):
        return max(range(len(duals)), key=duals.__getitem__)
    return max(range(len(curve)), key=curve.__getitem__)


def _is_memory_short(planned: PlanningResult) -> bool:
    return sum(planned.duals) * planned.memory_limit >= _MIN_WORTHWHILE_SHARE * planned.step_s


def _memory_line(planned: PlanningResult, plan: Plan, slot: int) -> str:
    gain_ms_per_gib = ms_per_gib(planned)
    where = plan.slots.name(slot)
    if not _is_memory_short(planned):
        return f"memory is not short (most is kept in {where}): more of it would save nothing"
    more = planned.memory_limit / 100
    return (
        f"memory is short in {where}: 1 % more ({format_bytes(more)}) would save about "
        f"{format_s(gain_ms_per_gib * more / GIB / 1e3)} a step, {gain_ms_per_gib:.3g} ms a GiB"
    )


class _UnitExplainer:
    """Explains the sharding of each unit by its cost in the slot where memory is tightest."""

    def __init__(
        self, profile: Profile, plan: Plan, footprints: Footprints, tight_slot: int
    ) -> None:
        self._profile, self._plan, self._slots = profile, plan, plan.slots
        self._footprints, self._tight_slot = footprints, tight_slot
        self._tight_slot_name = plan.slots.name(tight_slot)

    def row(self, index: int) -> tuple[str, ...]:
        """Return the row of a unit, with the columns of `HEADERS`."""
        unit = self._plan.units[index]
        labels = (
            [str(unit.sharding)] + ["in host"] * unit.in_host + ["checkpoint"] * unit.checkpoint
        )
        return (
            unit.name,
            format_bytes(unit.numel * self._profile.parameter_bytes),
            ", ".join(labels),
            str(len(unit.blocks)),
            format_s(self._option(index, unit.sharding).link_s),
            self._reason(index, unit),
        )

    def _option(self, index: int, sharding: Sharding) -> UnitOption:
        unit, barrier = self._plan.units[index], self._plan.barrier
        choice = UnitChoice(sharding, unit.checkpoint, unit.in_host and sharding.shards_optimizer)
        return make_option(self._profile, index, choice, self._footprints, barrier=barrier)

    def _compared_with(self, index: int, sharding: Sharding) -> tuple[str, int]:
        """Return how another sharding differs: link time as text, extra bytes in the tight slot."""
        this = self._option(index, self._plan.units[index].sharding)
        other = self._option(index, sharding)
        this_bytes, other_bytes = (
            bytes_in_slot(o, index, self._tight_slot, self._slots) for o in (this, other)
        )
        return format_s(abs(other.link_s - this.link_s)), other_bytes - this_bytes

    def _reason(self, index: int, unit: Unit) -> str:
        if unit.used_often and unit.sharding.shards_parameters:
            return "used again after its own forward: it cannot be resharded before backward"
        if unit.sharding is Sharding.ZERO3:
            link_time, freed = self._compared_with(index, Sharding.ZERO2)
            return (
                f"resharded after forward: unsharded again for {link_time} of the link, which "
                f"frees {format_bytes(max(freed, 0))} in {self._tight_slot_name}"
            )
        if unit.sharding is Sharding.ZERO2:
            if index == self._slots.units - 1:
                return "backward begins with it: to reshard it would only mean to wait for it"
            link_time, less = self._compared_with(index, Sharding.ZERO3)
            return (
                f"kept until backward: {format_bytes(max(-less, 0))} in {self._tight_slot_name} "
                f"are worth less than {link_time} of the link"
            )
        _, less = self._compared_with(index, Sharding.ZERO2)
        more = f"{format_bytes(-less)} more than zero2" if less < 0 else "as little as zero2"
        when = (
            "and it can be unsharded at any time"
            if unit.sharding.shards_optimizer
            else "in one message"
        )
        return f"stays whole: {more} in {self._tight_slot_name}, {when}"
