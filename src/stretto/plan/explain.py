"""A plan in words: what each unit is kept as and why, what memory is worth, what would change."""

from dataclasses import dataclass

from stretto.plan.choosing import kept_in
from stretto.plan.footprint import Footprints
from stretto.plan.options import Choice, Option, option_of
from stretto.plan.planner import Planned
from stretto.plan.profile import Profile
from stretto.plan.value import Plan, Sharding, Unit
from stretto.units import format_bytes, format_s

GIB = 1 << 30
_WORTH = 0.01
"""Memory is short if all of it again would save more than such a share of a step."""
HEADERS = ("unit", "bytes", "kept as", "blocks", "on the link", "why")


@dataclass(frozen=True, slots=True)
class Explained:
    """What people want to know of a plan."""

    verdict: str
    """Time, bound, memory: one line."""
    memory: str
    """Where it is short, and what more of it is worth."""
    rows: tuple[tuple[str, ...], ...]
    """A row for each unit, as `HEADERS` say."""


def explain(planned: Planned, profile: Profile) -> Explained:
    """Return ``planned`` in words."""
    footprints, plan = Footprints(profile), planned.plan
    profile = profile.run_by(plan)
    short = _shortest(planned, footprints.curve(plan))
    telling = _Telling(profile, plan, footprints, short)
    rows = tuple(telling.row(index) for index in range(len(plan.units)))
    return Explained(verdict(planned), _memory(planned, plan, short), rows)


def ms_per_gib(planned: Planned) -> float:
    """Return how many milliseconds of a step one more GiB would save, as long as that is so."""
    return sum(planned.prices) * GIB * 1e3


def verdict(planned: Planned) -> str:
    """Return in one line what a plan promises: time, bound, memory."""
    gain = planned.greedy_s / planned.step_s - 1
    greedy = f"; {gain:.1%} faster than without the solver" if gain > 5e-4 else ""
    barrier = "; all gradients are there before the update" if planned.plan.barrier else ""
    return (
        f"a step takes {format_s(planned.step_s)}, {planned.gap:.1%} more than the bound of any "
        f"plan ({format_s(planned.bound_s)}){greedy}{barrier}; a rank keeps "
        f"{format_bytes(planned.peak_bytes)} of {format_bytes(planned.budget)}"
    )


def _shortest(planned: Planned, curve: list[int]) -> int:
    """Return the slot in which memory is dearest, or fullest if it costs nothing."""
    prices = planned.prices
    if _is_short(planned):
        return max(range(len(prices)), key=prices.__getitem__)
    return max(range(len(curve)), key=curve.__getitem__)


def _is_short(planned: Planned) -> bool:
    return sum(planned.prices) * planned.budget >= _WORTH * planned.step_s


def _memory(planned: Planned, plan: Plan, slot: int) -> str:
    worth = ms_per_gib(planned)
    where = plan.slots.name(slot)
    if not _is_short(planned):
        return f"memory is not short (most is kept in {where}): more of it would save nothing"
    more = planned.budget / 100
    return (
        f"memory is short in {where}: 1 % more ({format_bytes(more)}) would save about "
        f"{format_s(worth * more / GIB / 1e3)} a step, {worth:.3g} ms a GiB"
    )


class _Telling:
    """Tells why each unit of a plan is kept as it is, seen from where memory is short."""

    def __init__(self, profile: Profile, plan: Plan, footprints: Footprints, short: int) -> None:
        self._profile, self._plan, self._slots = profile, plan, plan.slots
        self._footprints, self._short = footprints, short
        self._where = plan.slots.name(short)

    def row(self, index: int) -> tuple[str, ...]:
        """Return what `HEADERS` say of a unit."""
        unit = self._plan.units[index]
        words = [str(unit.sharding)] + ["in host"] * unit.in_host + ["checkpoint"] * unit.checkpoint
        return (
            unit.name,
            format_bytes(unit.numel * self._profile.parameter_bytes),
            ", ".join(words),
            str(len(unit.blocks)),
            format_s(self._option(index, unit.sharding).channel_s),
            self._reason(index, unit),
        )

    def _option(self, index: int, sharding: Sharding) -> Option:
        unit, barrier = self._plan.units[index], self._plan.barrier
        choice = Choice(sharding, unit.checkpoint, unit.in_host and sharding.is_split)
        return option_of(self._profile, index, choice, self._footprints, barrier=barrier)

    def _against(self, index: int, sharding: Sharding) -> tuple[str, int]:
        """Return seconds of the link, and bytes more where memory is short, that another takes."""
        mine = self._option(index, self._plan.units[index].sharding)
        other = self._option(index, sharding)
        kept, would = (kept_in(o, index, self._short, self._slots) for o in (mine, other))
        return format_s(abs(other.channel_s - mine.channel_s)), would - kept

    def _reason(self, index: int, unit: Unit) -> str:
        if unit.used_often and unit.sharding.is_freed:
            return "used again after its own forward: it cannot be let go before backward"
        if unit.sharding is Sharding.ZERO3:
            again, freed = self._against(index, Sharding.ZERO2)
            return (
                f"let go after forward: gathered again for {again} of the link, which frees "
                f"{format_bytes(max(freed, 0))} in {self._where}"
            )
        if unit.sharding is Sharding.ZERO2:
            if index == self._slots.units - 1:
                return "backward begins with it: letting it go would only mean to wait for it"
            again, less = self._against(index, Sharding.ZERO3)
            return (
                f"kept until backward: {format_bytes(max(-less, 0))} in {self._where} are worth "
                f"less than {again} of the link"
            )
        _, less = self._against(index, Sharding.ZERO2)
        more = f"{format_bytes(-less)} more than zero2" if less < 0 else "as little as zero2"
        when = "and it can be gathered at any time" if unit.sharding.is_split else "in one message"
        return f"stays whole: {more} in {self._where}, {when}"
