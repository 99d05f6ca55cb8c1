"""The plan of a sharded run: its units, the sharding of each, and every message with its window.

A plan is checked by `stretto.planner.check`, its memory is computed by `stretto.planner.memory`,
and `stretto.strategies.sharded` executes it. All ranks have the same plan, and it does not depend
on the number of ranks.

A cycle of a plan has one slot for each unit's backward, one for the update, and one for each unit's
forward. It starts with backward, so the reduction of a gradient, the update and the unshard of the
updated parameters all lie in one cycle, and every window is one interval::

    slot      0       1      ...   L-1     L        L+1     ...    2L
              b(L-1)  b(L-2)       b(0)    update   f(0)           f(L-1)

The forward of a cycle therefore belongs to the next training step. Moments are counted in half
slots: slot t starts at 2t and ends at 2t + 1.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stretto.errors import ConfigError
from stretto.renamed import MESSAGE_KINDS

PLAN_SCHEMA = 1


class FrozenModel(BaseModel):
    """An immutable value that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class VersionedModel(FrozenModel):
    """A value saved in a JSON file of its own, with the version of the file format."""

    schema_version: int


_VersionedT = TypeVar("_VersionedT", bound=VersionedModel)


def read_versioned(path: Path, kind: type[_VersionedT], name: str, schema: int) -> _VersionedT:
    """Read a value of type ``kind`` from the JSON file at ``path``.

    Args:
        path: The file.
        kind: The type of the value.
        name: What error messages call the value, such as "plan".
        schema: The version that the file must have.

    Raises:
        ConfigError: The file cannot be read, or does not hold such a value of this version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"cannot read the {name} {path}: {reason}") from None
    try:
        value = kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ConfigError(f"{path} is not a {name}: {where}: {first['msg']}") from None
    if value.schema_version != schema:
        raise ConfigError(
            f"{path} is a {name} of version {value.schema_version}, this program reads {schema}: "
            "make it anew"
        )
    return value


@dataclass(frozen=True, slots=True)
class Slots:
    """The numbering of the slots of one cycle, for a model of ``units`` units."""

    units: int

    @property
    def count(self) -> int:
        """The number of slots in one cycle."""
        return 2 * self.units + 1

    @property
    def update(self) -> int:
        """The slot of the optimizer update, for plans whose update waits for all gradients."""
        return self.units

    def backward(self, unit: int) -> int:
        """Return the slot of a unit's backward."""
        return self.units - 1 - unit

    def forward(self, unit: int) -> int:
        """Return the slot of a unit's forward."""
        return self.units + 1 + unit

    def is_forward(self, slot: int) -> bool:
        """Return whether ``slot`` belongs to the forward at the end of the cycle."""
        return slot > self.units

    def name(self, slot: int) -> str:
        """Return the displayed name of ``slot``: b3, update, f0."""
        cycle, slot = divmod(slot, self.count)
        later = "" if not cycle else f" of the cycle {'after' if cycle > 0 else 'before'}"
        if slot == self.update:
            return f"update{later}"
        if slot < self.update:
            return f"b{self.units - 1 - slot}{later}"
        return f"f{slot - self.units - 1}{later}"


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes of one element of a unit, in each of its forms."""

    parameter: int = 4
    """As a parameter in computation and in unshard messages."""
    gradient: int = 4
    """As a gradient in reduce messages."""
    kept: int = 4
    """As the copy that the optimizer updates."""
    state: int = 0
    """All optimizer state of the element."""


class Sharding(StrEnum):
    """What a rank keeps of a unit between its uses."""

    DP = "dp"
    """Whole parameters; gradients are all-reduced (no sharding)."""
    ZERO1 = "zero1"
    """Whole parameters and memory for all gradients; each rank updates its own chunks only."""
    SDP = "sdp"
    """Whole parameters; gradients are freed once reduced. Each rank updates its own chunks only."""
    ZERO2 = "zero2"
    """A rank's own chunks; parameters stay whole from before forward until after backward."""
    ZERO3 = "zero3"
    """A rank's own chunks; parameters are whole for forward, and again for backward."""

    @property
    def shards_optimizer(self) -> bool:
        """Whether each rank updates its own chunks only and receives the others by an unshard."""
        return self is not Sharding.DP

    @property
    def shards_parameters(self) -> bool:
        """Whether whole parameters exist only around their use."""
        return self in (Sharding.ZERO2, Sharding.ZERO3)


class MessageKind(StrEnum):
    """The kinds of communication of one block. The values are those of plan files."""

    REDUCE = "reduce"
    """Sum the gradients: on all ranks (dp), or each chunk on its owner (reduce-scatter)."""
    UNSHARD = "unshard"
    """All-gather the updated chunks into whole parameters, for forward."""
    UNSHARD_FOR_BACKWARD = "unshard_for_backward"
    """All-gather the chunks again for backward, for a unit that was resharded after forward."""

    @classmethod
    def _missing_(cls, value: object) -> "MessageKind | None":
        """Accept the values of older plan files."""
        new = MESSAGE_KINDS.get(str(value))
        return None if new is None else cls(new)


class Unit(FrozenModel):
    """Part of the model that is unsharded, used and reduced as one."""

    name: str
    numel: int = Field(ge=1)
    """Trainable elements."""
    sharding: Annotated[Sharding, Field(strict=False)]
    blocks: tuple[Annotated[int, Field(ge=1)], ...]
    """Elements of each block; they add up to ``numel``."""
    checkpoint: bool = False
    """Whether backward recomputes the activations."""
    in_host: bool = False
    """Whether the unit is sharded over the ranks of one host; every host then holds all of it."""
    used_often: bool = False
    """Whether its parameters are also used after its forward (tied weights).

    Such a unit may not be resharded after its forward.
    """


class PlanMessage(FrozenModel):
    """One communication of one block, with its window from ``gate`` to ``due``."""

    what: Annotated[MessageKind, Field(strict=False)]
    unit: int = Field(ge=0)
    block: int = Field(ge=0)
    gate: int = Field(ge=0)
    """The message may not start before this slot starts."""
    due: int = Field(ge=0)
    """This slot waits until the message is complete."""


class Plan(VersionedModel):
    """All messages of a cycle. `stretto.planner.check.check` tells whether it can be executed."""

    units: tuple[Unit, ...]
    messages: tuple[PlanMessage, ...]
    """The messages of one cycle, in the order in which they start."""
    barrier: bool = False
    """Whether the update waits for all gradients, for example to clip their norm."""
    whole_layers: bool = False
    """Whether the optimizer reads a whole unit (LARS, LAMB), not each element by itself."""
    unit_bytes: int | None = Field(default=None, ge=0)
    """Small neighbouring modules were joined into units up to this size; None if unknown.

    A run of this plan forms its units in the same way.
    """
    schema_version: int = PLAN_SCHEMA

    @cached_property
    def slots(self) -> Slots:
        """The slots of the plan's cycle."""
        return Slots(len(self.units))

    @cached_property
    def is_reordered(self) -> bool:
        """Whether reductions, and the unshards behind them, leave the order of use."""
        order = [
            (
                message.what is MessageKind.UNSHARD,
                message.unit * (-1) ** (message.what is MessageKind.REDUCE),
            )
            for message in self.messages
            if message.what is not MessageKind.UNSHARD_FOR_BACKWARD
        ]
        return order != sorted(order)

    @property
    def has_tight_windows(self) -> bool:
        """Whether an unshard that could start earlier may start only one slot before its use."""
        count, update = self.slots.count, self.slots.update
        return any(
            (m.due - m.gate) % count == 1 != m.due - update
            for m in self.messages_of(MessageKind.UNSHARD)
        )

    def messages_of(self, what: MessageKind) -> Iterator[PlanMessage]:
        """Yield the messages of one kind, in order."""
        return (message for message in self.messages if message.what is what)

    def digest(self) -> str:
        """Return a fingerprint: equal plans have equal digests on all ranks and machines."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return the plan as one JSON object."""
        return self.model_dump_json(indent=1)

    def replace(self, **changes: Any) -> "Plan":  # noqa: ANN401 - any field
        """Return a copy of the plan with ``changes`` applied."""
        changed = self.model_copy(update=changes)
        for name in ("slots", "is_reordered"):  # cached for the old units and messages
            changed.__dict__.pop(name, None)
        return changed


def read_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        ConfigError: The file cannot be read, or does not hold a plan.
    """
    return read_versioned(path, Plan, "plan", PLAN_SCHEMA)
