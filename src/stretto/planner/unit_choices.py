"""Options of each unit (sharding, checkpointing, in-host sharding), and choices that fit in memory.

`all_options` lists the options of each unit with their link time and bytes. `OptionAssigner` picks
one option per unit so that the plan keeps within a memory limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stretto.errors import ConfigError
from stretto.planner.memory import Footprints, UnitMemory
from stretto.planner.message_windows import just_in_time_plan
from stretto.planner.plan import MessageKind, Plan, Sharding, Slots, Unit
from stretto.planner.profile import Profile
from stretto.units import format_bytes

_MAX_REPAIR_STEPS = 400
_MAX_UNITS_TO_TRY_ALL = 100
"""Models with more units skip the exhaustive search for a smaller peak."""


@dataclass(frozen=True, slots=True)
class PlanConstraints:
    """The options that a plan may use, and properties of the run that it must respect."""

    shardings: tuple[Sharding, ...] = (
        Sharding.DP,
        Sharding.ZERO1,
        Sharding.SDP,
        Sharding.ZERO2,
        Sharding.ZERO3,
    )
    checkpoint: bool = False
    """Whether backward may recompute activations (activation checkpointing)."""
    in_host: bool = True
    """Whether units may be sharded inside each host, if several hosts have several ranks each."""
    blocks: bool = True
    """Whether a unit may be sent in several blocks."""
    barrier: bool = False
    """Whether the update waits for all gradients."""
    whole_layers: bool = False
    """Whether the optimizer reads whole units (LARS, LAMB)."""


class UnitChoice(NamedTuple):
    """The sharding of one unit, and whether it is checkpointed and sharded inside hosts."""

    sharding: Sharding
    checkpoint: bool = False
    in_host: bool = False


class UnitOption(NamedTuple):
    """A choice for one unit with its costs, if the unit is sent as one block."""

    choice: UnitChoice
    unit_memory: UnitMemory
    reduce_s: float
    unshard_s: float
    unshard_for_backward_s: float
    recompute_s: float
    """Seconds of forward that backward computes again."""
    saved_activation_bytes: int
    """Bytes of activations kept from forward to backward."""
    running_extra_bytes: int
    """Bytes of recomputed activations and workspace needed on top while the unit runs."""

    @property
    def link_s(self) -> float:
        """Seconds that the link is busy with the unit in one step."""
        return self.reduce_s + self.unshard_s + self.unshard_for_backward_s

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients between the unit's backward and the end of their reduction."""
        return sum(self.unit_memory.gradients)


def make_unit(profile: Profile, index: int, choice: UnitChoice, blocks: Sequence[int] = ()) -> Unit:
    """Return unit ``index`` of the profile under ``choice``; one block if ``blocks`` is empty."""
    cost = profile.units[index]
    return Unit(
        name=cost.name,
        numel=cost.numel,
        sharding=choice.sharding,
        blocks=tuple(blocks) or (cost.numel,),
        checkpoint=choice.checkpoint,
        in_host=choice.in_host,
        used_often=cost.used_often,
    )


def all_options(
    profile: Profile, constraints: PlanConstraints, footprints: Footprints
) -> list[tuple[UnitOption, ...]]:
    """Return the options of each unit, without those that another option dominates."""
    return [
        _undominated(
            [make_option(profile, i, c, footprints, barrier=constraints.barrier) for c in choices]
        )
        for i, choices in enumerate(_possible_choices(profile, constraints))
    ]


def _possible_choices(profile: Profile, constraints: PlanConstraints) -> list[list[UnitChoice]]:
    in_host_choices = (
        [False, True] if constraints.in_host and profile.link.is_hierarchical else [False]
    )
    return [
        [
            UnitChoice(sharding, recompute, in_host)
            for sharding in constraints.shardings
            for recompute in ([False, True] if constraints.checkpoint else [False])
            for in_host in in_host_choices
            if not (unit.used_often and (recompute or sharding is Sharding.ZERO3))
            and not (in_host and not sharding.shards_optimizer)
        ]
        for unit in profile.units
    ]


def make_option(
    profile: Profile, index: int, choice: UnitChoice, footprints: Footprints, *, barrier: bool
) -> UnitOption:
    """Return the option of unit ``index`` of the profile under ``choice``, with its costs."""
    cost, unit = profile.units[index], make_unit(profile, index, choice)
    has_unshard = choice.sharding.shards_optimizer
    recompute = choice.checkpoint
    recomputed_bytes = max(0, cost.activation_bytes - cost.input_bytes) if recompute else 0
    return UnitOption(
        choice,
        footprints.of_unit(index, unit, barrier),
        profile.transfer_s(unit, MessageKind.REDUCE, cost.numel),
        profile.transfer_s(unit, MessageKind.UNSHARD, cost.numel) if has_unshard else 0.0,
        profile.transfer_s(unit, MessageKind.UNSHARD_FOR_BACKWARD, cost.numel)
        if choice.sharding is Sharding.ZERO3
        else 0.0,
        cost.forward_s if recompute else 0.0,
        cost.input_bytes if recompute else cost.activation_bytes,
        recomputed_bytes + cost.workspace_bytes,
    )


def _undominated(options: Sequence[UnitOption]) -> tuple[UnitOption, ...]:
    """Return the options without those that send the same messages as another but keep more.

    In practice this removes ZeRO-1 beside `Sharding.SDP`: ZeRO-1 keeps gradient memory all the
    time, SDP only while gradients wait for their reduction.
    """
    return tuple(
        option
        for option in options
        if not any(_dominates(other, option) for other in options if other is not option)
    )


def _dominates(one: UnitOption, other: UnitOption) -> bool:
    if one.choice != other.choice._replace(sharding=Sharding.SDP):
        return False
    most = one.unit_memory.persistent + one.gradient_bytes + sum(one.unit_memory.reduced_gradients)
    least = other.unit_memory.persistent + sum(other.unit_memory.reduced_gradients)
    return other.choice.sharding is Sharding.ZERO1 and most <= least


class OptionAssigner:
    """Picks one option for each unit of a profile so that the plan keeps within a memory limit."""

    def __init__(
        self,
        profile: Profile,
        options: Sequence[tuple[UnitOption, ...]],
        footprints: Footprints,
        constraints: PlanConstraints,
    ) -> None:
        self._profile, self.options = profile, options
        self.footprints, self._constraints = footprints, constraints

    def just_in_time_plan_of(
        self, selected_options: Sequence[UnitOption], blocks: Sequence[Sequence[int]] = ()
    ) -> Plan:
        """Return the plan of these options that keeps least: every message as late as possible."""
        block_lengths = blocks or [()] * len(selected_options)
        units = [
            make_unit(self._profile, i, option.choice, lengths)
            for i, (option, lengths) in enumerate(zip(selected_options, block_lengths, strict=True))
        ]
        constraints = self._constraints
        return just_in_time_plan(
            units, barrier=constraints.barrier, whole_layers=constraints.whole_layers
        )

    def fastest_options(self) -> list[UnitOption]:
        """Return for each unit the option with the least link time plus recompute time."""
        return [
            min(unit_options, key=lambda o: o.link_s + o.recompute_s)
            for unit_options in self.options
        ]

    def least_memory_options(self) -> list[UnitOption]:
        """Return for each unit the option that keeps least by itself.

        The peak of the result is close to the smallest one, and needs no search.
        """
        return [
            min(unit_options, key=lambda o: (o.unit_memory.persistent, o.saved_activation_bytes))
            for unit_options in self.options
        ]

    def least_peak_options(self) -> list[UnitOption]:
        """Return the options with the smallest peak that changing one unit at a time finds."""
        starts = [self.least_memory_options(), self._lower_peak(self.fastest_options())]
        return min((self._minimize_peak(start) for start in starts), key=self._peak)

    def _peak(self, selected_options: Sequence[UnitOption]) -> int:
        return self.footprints.peak(self.just_in_time_plan_of(selected_options))

    def _minimize_peak(self, selected_options: list[UnitOption]) -> list[UnitOption]:
        """Change single options until none of them lowers the memory curve.

        Curves are compared by their sorted values, largest first. A change that keeps the peak but
        lowers the next values counts: those slots may block a later change.
        """
        best, least = selected_options, self._sorted_curve(selected_options)
        better = len(selected_options) <= _MAX_UNITS_TO_TRY_ALL
        while better:
            better = False
            for unit, unit_options in enumerate(self.options):
                for option in unit_options:
                    tried = [*best[:unit], option, *best[unit + 1 :]]
                    if (sorted_curve := self._sorted_curve(tried)) < least:
                        best, least, better = tried, sorted_curve, True
        return best

    def _sorted_curve(self, selected_options: Sequence[UnitOption]) -> list[int]:
        """Return the bytes kept in each slot, sorted from most to least."""
        return sorted(
            self.footprints.curve(self.just_in_time_plan_of(selected_options)), reverse=True
        )

    def _lower_peak(self, selected_options: list[UnitOption]) -> list[UnitOption]:
        """Return options with the lowest peak that `try_fit_to_memory` reaches."""
        now, least = selected_options, self._peak(selected_options)
        while True:
            tried = self.try_fit_to_memory(now, least - 1)
            if tried is None:
                return now
            now, least = tried, self._peak(tried)

    def fit_to_memory(
        self, selected_options: Sequence[UnitOption], memory_limit: int
    ) -> list[UnitOption]:
        """Return options near ``selected_options`` that fit, or those with the least peak."""
        return self.try_fit_to_memory(selected_options, memory_limit) or self.least_peak_options()

    def try_fit_to_memory(
        self, selected_options: Sequence[UnitOption], memory_limit: int
    ) -> list[UnitOption] | None:
        """Return options near ``selected_options`` that fit into ``memory_limit`` bytes.

        None if none were found.
        """
        now = list(selected_options)
        for _ in range(_MAX_REPAIR_STEPS):
            curve = self.footprints.curve(self.just_in_time_plan_of(now))
            slot = max(range(len(curve)), key=curve.__getitem__)
            excess = curve[slot] - memory_limit
            if excess <= 0:
                return now
            better = self._free_in_slot(now, slot, excess)
            if better is None:
                return None
            now = better
        return None

    def _free_in_slot(
        self, selected_options: list[UnitOption], slot: int, excess: int
    ) -> list[UnitOption] | None:
        """Swap options until ``excess`` bytes are free in ``slot``, fewest seconds per byte first.

        None if no swap frees anything there.
        """
        slots = Slots(len(selected_options))
        swaps: list[tuple[float, int, int, UnitOption]] = []
        for unit, (option, unit_options) in enumerate(
            zip(selected_options, self.options, strict=True)
        ):
            before = bytes_in_slot(option, unit, slot, slots)
            for other in unit_options:
                saved = before - bytes_in_slot(other, unit, slot, slots)
                if saved > 0:
                    more_s = other.link_s + other.recompute_s - option.link_s - option.recompute_s
                    swaps.append((more_s / saved, -saved, unit, other))
        if not swaps:
            return None
        swaps.sort(key=lambda swap: swap[:3])
        changed, done = list(selected_options), set[int]()
        for _, saved, unit, other in swaps:
            if excess <= 0:
                break
            if unit not in done:
                changed[unit] = other
                done.add(unit)
                excess += saved
        return changed


def bytes_in_slot(option: UnitOption, unit: int, slot: int, slots: Slots) -> int:
    """Return the least bytes a unit keeps in a slot: states, parameters, gradients, activations."""
    forward, backward = slots.forward(unit), slots.backward(unit)
    kept = option.unit_memory.persistent
    live = slot >= forward or slot <= backward
    if live:
        kept += option.saved_activation_bytes
    if slot in (forward, backward):
        kept += option.running_extra_bytes + option.unit_memory.unsharded
    elif live and option.choice.sharding is Sharding.ZERO2:
        kept += option.unit_memory.unsharded - option.unit_memory.shard_overlap
    if slot in (backward, backward + 1):
        kept += option.gradient_bytes
    return kept


class InsufficientMemoryError(ConfigError):
    """No plan keeps within the memory limit."""


def refuse_if_infeasible(
    profile: Profile, memory_limit: int, assigner: OptionAssigner, footprints: Footprints
) -> None:
    """Raise an error if no plan keeps within ``memory_limit`` bytes.

    Raises:
        InsufficientMemoryError: The message names the least memory needed and its largest part.
    """
    if assigner.try_fit_to_memory(assigner.fastest_options(), memory_limit) is not None:
        return
    plan = assigner.just_in_time_plan_of(assigner.least_peak_options())
    least = footprints.peak(plan)
    if least <= memory_limit:
        return
    raise InsufficientMemoryError(
        f"no plan fits into {format_bytes(memory_limit)}: the smallest needs {_rounded_up(least)}, "
        f"{_largest_part(plan, profile, footprints)}"
    )


def _rounded_up(num_bytes: int) -> str:
    """Return ``num_bytes`` rounded up to three digits, as text."""
    grain = 10 ** max(0, len(str(num_bytes)) - 3)
    return format_bytes(-(-num_bytes // grain) * grain)


def _largest_part(plan: Plan, profile: Profile, footprints: Footprints) -> str:
    curve = footprints.curve(plan)
    slot = max(range(len(curve)), key=curve.__getitem__)
    persistent = sum(unit_memory.persistent for unit_memory in footprints.unit_memories(plan))
    activations = footprints.activations(plan)[slot] - profile.other_bytes
    travels = curve[slot] - persistent - activations - profile.other_bytes
    parts = {
        "activations (a smaller batch, or strategy.checkpoint)": activations,
        "chunks and optimizer state (more ranks)": persistent,
        "whole parameters and gradients of the unit that runs (smaller units)": travels,
        "buffers, frozen parameters, the batch, workspaces of libraries": profile.other_bytes,
    }
    most = max(parts, key=parts.__getitem__)
    return f"of which {format_bytes(parts[most])} are {most}, in {plan.slots.name(slot)}"
