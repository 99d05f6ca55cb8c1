"""A plan as a value: units, how each is sharded, and every communication with its window.

The same plan is checked (`stretto.plan.check`), charged with memory (`stretto.plan.memory`) and
carried out (`stretto.strategy.sharded`). It is equal on all ranks, and holds no number of ranks.
"""

import hashlib
from collections.abc import Iterator
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from stretto.plan.saved import Saved, Value, read_saved
from stretto.plan.slots import Slots

SCHEMA = 1


class Sharding(StrEnum):
    """What a rank keeps of a unit between its uses."""

    DP = "dp"
    """Everything; gradients are summed for all."""
    ZERO1 = "zero1"
    """Parameters, and room for all gradients; updates its own chunks only."""
    SDP = "sdp"
    """Parameters; gradients go as soon as they are reduced."""
    ZERO2 = "zero2"
    """Its own chunks; whole parameters from before forward until after backward."""
    ZERO3 = "zero3"
    """Its own chunks; whole parameters for forward, and again for backward."""

    @property
    def is_split(self) -> bool:
        """Whether each rank updates its own chunks only."""
        return self is not Sharding.DP

    @property
    def is_freed(self) -> bool:
        """Whether whole parameters come and go."""
        return self in (Sharding.ZERO2, Sharding.ZERO3)


class What(StrEnum):
    """A communication of one block."""

    REDUCE = "reduce"
    """Gradients become sums: everywhere, or each chunk at its owner."""
    GATHER = "gather"
    """Updated chunks become whole parameters, for forward."""
    REGATHER = "regather"
    """The same for backward, of a unit that was let go after forward."""


class Unit(Value):
    """A stretch of the model that is gathered, used and reduced as one."""

    name: str
    numel: int = Field(ge=1)
    """Trainable elements."""
    sharding: Annotated[Sharding, Field(strict=False)]
    blocks: tuple[Annotated[int, Field(ge=1)], ...]
    """Elements of each block; they add up to ``numel``."""
    checkpoint: bool = False
    """Whether backward computes the activations again."""
    in_host: bool = False
    """Whether chunks are those of a host's ranks: every host holds the whole unit."""
    used_often: bool = False
    """Whether it is used after its own forward, too (tied weights): it may not be let go then."""


class Message(Value):
    """One communication, with its window."""

    what: Annotated[What, Field(strict=False)]
    unit: int = Field(ge=0)
    block: int = Field(ge=0)
    gate: int = Field(ge=0)
    """The slot before whose start it may not begin."""
    due: int = Field(ge=0)
    """The slot that waits for it."""


class Plan(Saved):
    """What all ranks do in a cycle; `stretto.plan.check.check` says whether it can be done."""

    units: tuple[Unit, ...]
    messages: tuple[Message, ...]
    """In the order in which they begin, one cycle after the other."""
    barrier: bool = False
    """Whether the update waits for all gradients, for somebody who reads them."""
    whole_layers: bool = False
    """Whether an update looks at a whole unit (LARS, LAMB), not at each element by itself."""
    unit_bytes: int | None = Field(default=None, ge=0)
    """Up to which neighbours were joined to units, if that is known: who runs it joins as many."""
    schema_version: int = SCHEMA

    @cached_property
    def slots(self) -> Slots:
        """The plan's cycle."""
        return Slots(len(self.units))

    @cached_property
    def strays(self) -> bool:
        """Whether reductions, and gathers behind them, are in another order than that of use."""
        order = [
            (message.what is What.GATHER, message.unit * (-1) ** (message.what is What.REDUCE))
            for message in self.messages
            if message.what is not What.REGATHER
        ]
        return order != sorted(order)

    @property
    def hurries(self) -> bool:
        """Whether something may be gathered only a slot before its use, and could be earlier."""
        count, update = self.slots.count, self.slots.update
        return any((m.due - m.gate) % count == 1 != m.due - update for m in self.of(What.GATHER))

    def of(self, what: What) -> Iterator[Message]:
        """Yield the messages of one sort, in order."""
        return (message for message in self.messages if message.what is what)

    def digest(self) -> str:
        """Return a fingerprint, the same wherever the plan is the same."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return the plan as one JSON object."""
        return self.model_dump_json(indent=1)

    def replace(self, **changes: Any) -> "Plan":  # noqa: ANN401 - any field
        """Return a plan that differs in ``changes``."""
        changed = self.model_copy(update=changes)
        for known in ("slots", "strays"):  # worked out for the units and messages it had
            changed.__dict__.pop(known, None)
        return changed


def read_plan(path: Path) -> Plan:
    """Read a plan that somebody wrote.

    Raises:
        ConfigError: There is no such file, or it holds something else.
    """
    return read_saved(path, Plan, "plan", SCHEMA)
