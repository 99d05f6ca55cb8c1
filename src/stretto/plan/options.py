"""What may be chosen for each unit, and what each choice takes: time on the link, bytes kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stretto.plan.footprint import Footprints
from stretto.plan.memory import Holding
from stretto.plan.profile import Profile
from stretto.plan.value import Sharding, Unit, What


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a plan may use."""

    shardings: tuple[Sharding, ...] = (
        Sharding.DP,
        Sharding.ZERO1,
        Sharding.SDP,
        Sharding.ZERO2,
        Sharding.ZERO3,
    )
    checkpoint: bool = False
    """Whether activations may be computed again."""
    in_host: bool = True
    """Whether units may be shared out inside hosts, where several have several ranks."""
    blocks: bool = True
    """Whether units may travel in several blocks."""
    barrier: bool = False
    """Whether the update waits for all gradients."""
    whole_layers: bool = False
    """Whether an update looks at whole units."""


class Choice(NamedTuple):
    """How one unit is kept."""

    sharding: Sharding
    checkpoint: bool = False
    in_host: bool = False


class Option(NamedTuple):
    """A choice, and what it takes; the unit travels as one block."""

    choice: Choice
    held: Holding
    reduce_s: float
    gather_s: float
    regather_s: float
    again_s: float
    """What backward computes twice."""
    kept_bytes: int
    """Of activations, from forward to backward."""
    running_bytes: int
    """Of activations and workspace, on top of what is kept, while it runs."""

    @property
    def channel_s(self) -> float:
        """All that the link carries for it in a step."""
        return self.reduce_s + self.gather_s + self.regather_s

    @property
    def gradient_bytes(self) -> int:
        """From its backward until they are reduced."""
        return sum(self.held.gradients)


def unit_of(profile: Profile, index: int, choice: Choice, blocks: Sequence[int] = ()) -> Unit:
    """Return the unit in that place with a choice made."""
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
    profile: Profile, allowed: Allowed, footprints: Footprints
) -> list[tuple[Option, ...]]:
    """Return the options of each unit that are not in every way worse than another."""
    return [
        _undominated(
            [option_of(profile, i, c, footprints, barrier=allowed.barrier) for c in choices]
        )
        for i, choices in enumerate(_choices(profile, allowed))
    ]


def _choices(profile: Profile, allowed: Allowed) -> list[list[Choice]]:
    places = [False, True] if allowed.in_host and profile.link.is_nested else [False]
    return [
        [
            Choice(sharding, again, in_host)
            for sharding in allowed.shardings
            for again in ([False, True] if allowed.checkpoint else [False])
            for in_host in places
            if not (unit.used_often and (again or sharding is Sharding.ZERO3))
            and not (in_host and not sharding.is_split)
        ]
        for unit in profile.units
    ]


def option_of(
    profile: Profile, index: int, choice: Choice, footprints: Footprints, *, barrier: bool
) -> Option:
    """Return what a choice takes for the unit in that place."""
    cost, unit = profile.units[index], unit_of(profile, index, choice)
    gathered = choice.sharding.is_split
    again = choice.checkpoint
    inner = max(0, cost.activation_bytes - cost.input_bytes) if again else 0
    return Option(
        choice,
        footprints.of_unit(index, unit, barrier),
        profile.carried_s(unit, What.REDUCE, cost.numel),
        profile.carried_s(unit, What.GATHER, cost.numel) if gathered else 0.0,
        profile.carried_s(unit, What.REGATHER, cost.numel)
        if choice.sharding is Sharding.ZERO3
        else 0.0,
        cost.forward_s if again else 0.0,
        cost.input_bytes if again else cost.activation_bytes,
        inner + cost.workspace_bytes,
    )


def _undominated(options: Sequence[Option]) -> tuple[Option, ...]:
    """Leave out what has the same messages as another, keeps more, and is in no way better.

    ZeRO-1 beside parameters that stay is one: it keeps room for gradients where the other has it
    only as long as they wait.
    """
    return tuple(
        option
        for option in options
        if not any(_is_better(other, option) for other in options if other is not option)
    )


def _is_better(one: Option, other: Option) -> bool:
    if one.choice != other.choice._replace(sharding=Sharding.SDP):
        return False
    most = one.held.always + one.gradient_bytes + sum(one.held.reduced)
    least = other.held.always + sum(other.held.reduced)
    return other.choice.sharding is Sharding.ZERO1 and most <= least
