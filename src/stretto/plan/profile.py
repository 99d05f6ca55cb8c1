"""What a model takes, unit by unit, and what a link takes: all that a plan's time depends on."""

import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from pydantic import Field

from stretto.errors import ConfigError
from stretto.plan.memory import Widths
from stretto.plan.presets import Shape
from stretto.plan.saved import Saved, Value, read_saved
from stretto.plan.value import Message, Plan, Sharding, Unit, What

SCHEMA = 1


class UnitCost(Value):
    """One unit on one rank."""

    name: str
    numel: int = Field(ge=1)
    """Trainable elements."""
    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    spread: float = Field(default=0.0, ge=0)
    """How far the two were apart in repeated steps, as a share of them."""
    activation_bytes: int = Field(default=0, ge=0)
    """Kept from its forward to its backward."""
    input_bytes: int = Field(default=0, ge=0)
    """Kept instead of them, where backward computes them again."""
    workspace_bytes: int = Field(default=0, ge=0)
    """Needed on top of everything while it runs."""
    tensors: tuple[int, ...] = ()
    """Elements of each of its parameters; as one when not told."""
    used_often: bool = False
    """As in a plan: it may not be let go after its own forward."""

    @property
    def shape(self) -> Shape:
        """What presets must know of it."""
        return Shape(self.name, self.numel, self.used_often)

    def stretched(self, longer: float) -> "UnitCost":
        """Return it taking so many times as long."""
        seconds = {"forward_s": self.forward_s * longer, "backward_s": self.backward_s * longer}
        return self.model_copy(update=seconds)

    def with_holes(self, share: float) -> "UnitCost":
        """Return it with such a share of its bytes on top."""
        fields = ("activation_bytes", "input_bytes", "workspace_bytes")
        return self.model_copy(
            update={name: math.ceil(getattr(self, name) * (1 + share)) for name in fields}
        )


class Link(Value):
    """What the messages of all ranks share."""

    ranks: int = Field(ge=1)
    latency_s: float = Field(default=0.0, ge=0)
    """Of one message."""
    bytes_per_s: float = Field(gt=0)
    """Of each rank's bytes, as many leaving as arriving; of each host's, where it has several."""
    lanes: int = Field(default=1, ge=1)
    """Messages that travel beside each other; they share the rate."""
    lane_share: float = Field(default=1.0, gt=0, le=1)
    """What of the rate one lane reaches where no other is busy."""
    gather_ratio: float = Field(default=1.0, gt=0)
    """How long a gather takes, in times of what a sum of as many bytes takes."""
    sum_ratio: float = Field(default=1.0, gt=0)
    """How long a sum for all takes, in times of a sum for each owner and a gather."""
    copies: bool = False
    """Whether what arrives on a lane needs room until it is added up: that of one rank's chunk."""
    hosts: int = Field(default=1, ge=1)
    """On which the ranks are, as many on each; what follows is for several ranks on several."""
    inner_latency_s: float = Field(default=0.0, ge=0)
    inner_bytes_per_s: float | None = Field(default=None, gt=0)
    """Inside a host; None: messages inside take no time."""

    @property
    def per_host(self) -> int:
        """Ranks of a host."""
        return self.ranks // self.hosts

    @property
    def is_nested(self) -> bool:
        """Whether there are several ranks on several hosts."""
        return self.hosts > 1 and self.per_host > 1

    def across_s(self, num_bytes: float) -> float:
        """Return how long it takes until all have their chunk of such a sum, or all chunks."""
        if self.ranks == 1:
            return 0.0
        if not self.is_nested:
            return self.latency_s + num_bytes * (self.ranks - 1) / self.ranks / self.bytes_per_s
        outside = num_bytes * (self.hosts - 1) / self.hosts / self.bytes_per_s
        return self.latency_s + outside + self.inside_s(num_bytes / self.hosts)

    def inside_s(self, num_bytes: float) -> float:
        """Return the same for the ranks of one host."""
        if self.inner_bytes_per_s is None or self.per_host == 1:
            return 0.0
        share = (self.per_host - 1) / self.per_host
        return self.inner_latency_s + num_bytes * share / self.inner_bytes_per_s

    def stretched(self, longer: float) -> "Link":
        """Return it taking so many times as long for every message."""
        inner = self.inner_bytes_per_s
        return self.model_copy(
            update={
                "latency_s": self.latency_s * longer,
                "bytes_per_s": self.bytes_per_s / longer,
                "inner_latency_s": self.inner_latency_s * longer,
                "inner_bytes_per_s": None if inner is None else inner / longer,
            }
        )


class Profile(Saved):
    """A model on a cluster."""

    units: tuple[UnitCost, ...]
    link: Link
    parameter_bytes: int = 4
    """Of one element, as it is gathered."""
    gradient_bytes: int = 4
    """Of one element, as it is reduced."""
    kept_bytes: int = 4
    """Of one element, as it is updated."""
    state_bytes: int = 0
    """Of all that the optimizer remembers of one element."""
    update_s: float = Field(default=0.0, ge=0)
    """Of the whole model, where the update waits for all gradients."""
    slowdown: float = Field(default=1.0, ge=1)
    """How many times as long computation takes while a message travels."""
    parting: float = Field(default=1.0, gt=0)
    """How many times as long everything takes where no barrier keeps the ranks together."""
    straying: float = Field(default=1.0, gt=0)
    """How many times as long it then takes, on top, by a plan that leaves the order of use."""
    straying_met: float = Field(default=1.0, gt=0)
    """The same of plans that have a barrier."""
    other_bytes: int = Field(default=0, ge=0)
    """What the model keeps besides: buffers, frozen parameters, the batch."""
    holes: float = Field(default=0.0, ge=0)
    """What an allocator takes around states and travel, as a share of them; that around everything
    else is counted there."""
    source: str = ""
    """Where these figures are from."""
    unit_bytes: int | None = Field(default=None, ge=0)
    """Up to which neighbours were joined, if that is known."""
    schema_version: int = SCHEMA

    @property
    def shapes(self) -> list[Shape]:
        """What presets must know of the units."""
        return [unit.shape for unit in self.units]

    @property
    def widths(self) -> Widths:
        """Bytes of one element."""
        return Widths(self.parameter_bytes, self.gradient_bytes, self.kept_bytes, self.state_bytes)

    @property
    def compute_s(self) -> float:
        """Forward and backward of all units."""
        return sum(unit.forward_s + unit.backward_s for unit in self.units)

    def message_s(self, plan: Plan, message: Message) -> float:
        """Return how long the link is busy with ``message``."""
        unit = plan.units[message.unit]
        return self.carried_s(unit, message.what, unit.blocks[message.block])

    def carried_s(self, unit: Unit, what: What, numel: int) -> float:
        """Return how long the link is busy with ``numel`` elements of ``unit``."""
        reduces = what is What.REDUCE
        num_bytes = numel * (self.gradient_bytes if reduces else self.parameter_bytes)
        turns = 1.0 if reduces else self.link.gather_ratio
        if unit.in_host and self.link.is_nested:
            inside_s = turns * self.link.inside_s(num_bytes)
            # Each rank adds up its chunk with those that have the same one on other hosts.
            hosts = self.link.hosts
            outside = 2 * num_bytes * (hosts - 1) / hosts / self.link.bytes_per_s
            return inside_s + (self.link.latency_s + outside) * reduces
        # To sum for all is to sum for each owner, and to tell all: two messages in one.
        if unit.sharding is Sharding.DP:
            turns = (turns + self.link.gather_ratio) * self.link.sum_ratio
        return turns * self.link.across_s(num_bytes)

    def channel_s(self, plan: Plan) -> float:
        """Return how long the link is busy in one step."""
        return sum(self.message_s(plan, message) for message in plan.messages)

    def lengths(self, checkpoints: Sequence[bool], *, barrier: bool) -> list[float]:
        """Return what each slot of a cycle takes by itself, given which units compute again."""
        again = zip(self.units, checkpoints, strict=True)
        backward = [unit.backward_s + unit.forward_s * twice for unit, twice in again]
        forward = [unit.forward_s for unit in self.units]
        return [*reversed(backward), self.update_s if barrier else 0.0, *forward]

    def with_holes(self, share: float, fixed_bytes: int) -> "Profile":
        """Return it for an allocator that needs such a share on top, and so many bytes by itself.

        Budgets are then what the allocator may take, not what it gives out.
        """
        return self.model_copy(
            update={
                "units": tuple(unit.with_holes(share) for unit in self.units),
                "other_bytes": math.ceil(self.other_bytes * (1 + share)) + fixed_bytes,
                "holes": share,
            }
        )

    @property
    def is_uneven(self) -> bool:
        """Whether ranks were seen to lose by waiting for each other."""
        return max(self.parting, self.straying, self.straying_met) > 1.0

    def run_by(self, plan: Plan) -> "Profile":
        """Return what it is for a plan: with a barrier or without, straying or not."""
        parting, straying = self.parting, self.straying
        if plan.barrier:
            parting, straying = 1.0, self.straying_met
        return self.stretched(parting * (straying if plan.strays else 1.0))

    def stretched(self, longer: float) -> "Profile":
        """Return it taking so many times as long, whatever the plan."""
        alike = {"parting": 1.0, "straying": 1.0, "straying_met": 1.0}
        if longer == 1.0:
            return self.model_copy(update=alike)
        units = tuple(unit.stretched(longer) for unit in self.units)
        changes = {"units": units, "link": self.link.stretched(longer)}
        return self.model_copy(update={**alike, **changes, "update_s": self.update_s * longer})


def check_same_units(profile: Profile, shapes: Sequence[Shape], called: str) -> None:
    """See that a profile, which people call ``called``, is one of these units.

    Raises:
        ConfigError: It is of others.
    """
    for index, (cost, shape) in enumerate(zip_longest(profile.units, shapes)):
        if cost is None or shape is None or (cost.name, cost.numel) != (shape.name, shape.numel):
            raise ConfigError(
                f"{called} is a profile of another model: its unit {index} is {_named(cost)}, here "
                f"it is {_named(shape)}; make it anew for this model and strategy.unit"
            )


def _named(unit: UnitCost | Shape | None) -> str:
    return "missing" if unit is None else f"{unit.name} of {unit.numel} elements"


def read_profile(path: Path) -> Profile:
    """Read a profile that was saved.

    Raises:
        ConfigError: There is no such file, or it holds something else.
    """
    return read_saved(path, Profile, "profile", SCHEMA)
