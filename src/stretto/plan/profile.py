"""What a model takes, unit by unit, and what a link takes: all that a plan's time depends on."""

from pathlib import Path

from pydantic import Field

from stretto.plan.presets import Shape
from stretto.plan.saved import Saved, Value, read_saved
from stretto.plan.value import Message, Plan, Sharding, What

SCHEMA = 1


class UnitCost(Value):
    """One unit on one rank."""

    name: str
    numel: int = Field(ge=1)
    """Trainable elements."""
    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    activation_bytes: int = Field(default=0, ge=0)
    """Kept from its forward to its backward."""
    used_often: bool = False
    """As in a plan: it may not be let go after its own forward."""


class Link(Value):
    """What the messages of all ranks share."""

    ranks: int = Field(ge=1)
    latency_s: float = Field(default=0.0, ge=0)
    """Of one message."""
    bytes_per_s: float = Field(gt=0)
    """Of each rank's bytes, as many leaving as arriving."""
    lanes: int = Field(default=1, ge=1)
    """Messages that travel beside each other; they share the rate."""


class Profile(Saved):
    """A model on a cluster."""

    units: tuple[UnitCost, ...]
    link: Link
    parameter_bytes: int = 4
    """Of one element, as it is gathered."""
    gradient_bytes: int = 4
    """Of one element, as it is reduced."""
    update_s: float = Field(default=0.0, ge=0)
    """Of the whole model, where the update waits for all gradients."""
    schema_version: int = SCHEMA

    @property
    def shapes(self) -> list[Shape]:
        """What presets must know of the units."""
        return [Shape(unit.name, unit.numel, unit.used_often) for unit in self.units]

    @property
    def compute_s(self) -> float:
        """Forward and backward of all units."""
        return sum(unit.forward_s + unit.backward_s for unit in self.units)

    def message_s(self, plan: Plan, message: Message) -> float:
        """Return how long the link is busy with ``message``."""
        unit = plan.units[message.unit]
        ranks = self.link.ranks
        width = self.gradient_bytes if message.what is What.REDUCE else self.parameter_bytes
        # To sum for all is to sum for each owner, and to tell all.
        turns = 2 if unit.sharding is Sharding.DP else 1
        sent = turns * unit.blocks[message.block] * width * (ranks - 1) / ranks
        return self.link.latency_s + sent / self.link.bytes_per_s if ranks > 1 else 0.0

    def channel_s(self, plan: Plan) -> float:
        """Return how long the link is busy in one step."""
        return sum(self.message_s(plan, message) for message in plan.messages)


def read_profile(path: Path) -> Profile:
    """Read a profile that was saved.

    Raises:
        ConfigError: There is no such file, or it holds something else.
    """
    return read_saved(path, Profile, "profile", SCHEMA)
