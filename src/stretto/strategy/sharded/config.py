"""The ``[strategy]`` table of a sharded run, and the plan that follows from it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from torch import nn

from stretto.comm.algorithms import ALL_GATHER, REDUCE_SCATTER
from stretto.comm.algorithms.table import parse_word
from stretto.config import Config
from stretto.errors import ConfigError
from stretto.plan.check import check
from stretto.plan.presets import PRESETS, Shape, Wish, named_plan, random_plan
from stretto.plan.profile import check_same_units, read_profile
from stretto.plan.units import ModelUnit, find_units
from stretto.plan.value import Plan, read_plan
from stretto.units import Bytes

AUTO = "auto"
UNIT_BYTES = 2_000_000
"""Neighbours are joined until a unit has so many, where nobody says otherwise."""
_AHEAD, _BEHIND = 1, 3
"""Units that zero3 gathers ahead, and slots that gradients wait for their reduction in others: what
measured best; zero3 is for those who want little memory, and waits for one."""
_PARTS = (1, 2, 4, 8, 16)
"""Equal parts in which a block can be sent: chunks are multiples of `stretto.comm.shards.ALIGN`."""


class ShardedConfig(Config):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"sharded"``."""

    kind: Literal["sharded"] = "sharded"
    plan: str = "zero2"
    """What is kept and when everything travels: "ddp", "zero1", "zero2", "zero3", "dear",
    "random 7" (valid, from a seed), or a file with a plan."""
    memory: Bytes | None = None
    """What a rank may keep, activations included: the plan is made for it when the run starts, in
    the place of `plan`, from what is known of the model: a profile, or an estimate."""
    profile: str | None = None
    """A file of stretto profile."""
    cluster: str | None = None
    """Where there is none: what links an estimate is for, by file or name."""
    device: str = "cpu"
    """And what device: cpu, h200, or operations and bytes a second as "3e14,2e12"."""
    prefetch: int | None = Field(default=None, ge=0)
    """Units ahead of the one that runs whose parameters may be gathered; when not set, 1 for zero3,
    and as many as there are for others."""
    pending: int | None = Field(default=None, ge=0)
    """Slots that a gradient may wait for its reduction before the model does; when not set, 3, or 1
    for zero3, where a forward was seen before (stretto train), else until it is needed."""
    unit: Bytes | None = None
    """Neighbours are joined until a unit has so many bytes; when not set, as many as the plan's
    file or the profile was made with, else 2 MB."""
    block: Bytes | None = None
    """Larger units travel in blocks of at most this size; whole when not set."""
    checkpoint: bool = False
    """Whether backward computes activations again instead of keeping them."""
    in_host: bool = False
    """Whether a unit is shared out among the ranks of a host only, each host having all of it."""
    algorithm: str = "auto"
    """How blocks are reduced and gathered: "ring", "ring/2", "hierarchical/4"; "auto" goes by the
    mesh."""
    wire: Literal["own", "fp32", "bf16", "fp16"] = "own"
    """What gradients travel as."""
    parameters: Literal["own", "bf16", "fp16"] = "own"
    """What parameters are gathered and used as; updates are made in their own type."""

    @field_validator("algorithm")
    @classmethod
    def _known_algorithm(cls, text: str) -> str:
        if text != AUTO:
            try:
                _, parts = parse_word(text, [name for name in REDUCE_SCATTER if name in ALL_GATHER])
            except ConfigError as wrong:
                raise ValueError(str(wrong)) from None
            if parts not in _PARTS:
                raise ValueError("blocks are sent in 1, 2, 4, 8 or 16 parts")
        return text


def checked_plan(
    config: ShardedConfig, model: nn.Module, calls: Sequence[str] | None = None
) -> Plan:
    """Return the plan of ``model``, whatever its optimizer; of one that is made later, any."""
    units = units_of(config, model, calls)
    if config.memory is not None:
        check_source(config, [unit.shape for unit in units])
        config = config.model_copy(update={"plan": "zero2"})
    return plan_for(config, units, whole_layers=False, seen=calls is not None)


def units_of(
    config: ShardedConfig, model: nn.Module, calls: Sequence[str] | None = None
) -> list[ModelUnit]:
    """Return the units that a run of ``model`` has, which calls its modules as ``calls`` say."""
    return find_units(model, unit_bytes(config) // _element_bytes(model), calls)


def unit_bytes(config: ShardedConfig) -> int:
    """Return up to how many bytes neighbours are joined."""
    if config.unit is not None:
        return config.unit
    made_with = None
    if config.memory is not None and config.profile is not None:
        made_with = read_profile(Path(config.profile)).unit_bytes
    elif config.memory is None and _is_file(config.plan):
        made_with = read_plan(Path(config.plan)).unit_bytes
    return made_with or UNIT_BYTES


def _is_file(plan: str) -> bool:
    return Path(plan).suffix == ".json"


def _element_bytes(model: nn.Module) -> int:
    return next((p.element_size() for p in model.parameters() if p.requires_grad), 4)


def plan_for(
    config: ShardedConfig, units: Sequence[ModelUnit], *, whole_layers: bool, seen: bool
) -> Plan:
    """Return the checked plan of a run; ``seen`` says that the units' order is that of a forward.

    Raises:
        ConfigError: There is no such preset, or the file's plan is for another model.
    """
    shapes = [unit.shape for unit in units]
    element_bytes = units[0].parameters[0].element_size()
    word, _, seed = config.plan.partition(" ")
    if word in PRESETS and not seed:
        wish = _wish(config, word, element_bytes, seen)
        plan = named_plan(word, shapes, replace(wish, whole_layers=whole_layers))
    elif word == "random" and (seed or "0").isdecimal():
        plan = random_plan(shapes, int(seed or 0), whole_layers=whole_layers)
    elif _is_file(config.plan):
        plan = fitting(read_plan(Path(config.plan)), shapes, config.plan)
        plan = plan.replace(whole_layers=plan.whole_layers or whole_layers)
    else:
        known = ", ".join([*PRESETS, "random SEED"])
        raise ConfigError(
            f"strategy.plan = {config.plan!r}: known are {known}, or a file that ends in .json"
        )
    check(plan)
    return plan


def check_source(config: ShardedConfig, shapes: Sequence[Shape]) -> None:
    """See that a plan can be made when the run starts.

    Raises:
        ConfigError: Nothing is known of the model or the links, or it is of another model.
    """
    if config.profile is None and config.cluster is None:
        raise ConfigError(
            "strategy.memory: a plan needs to know what the model and the links take; set "
            "strategy.profile, a file of stretto profile, or strategy.cluster, a file of stretto "
            "calibrate or a name, for an estimate"
        )
    if config.profile is not None:
        known = read_profile(Path(config.profile))
        check_same_units(known, shapes, config.profile)


def _wish(config: ShardedConfig, word: str, element_bytes: int, seen: bool) -> Wish:
    frugal = word == "zero3"
    prefetch = _AHEAD if config.prefetch is None and frugal else config.prefetch
    # A rank that runs ahead takes the cores from those that it then waits for; but who waits in
    # backward must know its order.
    pending = config.pending
    if pending is None and seen:
        pending = 1 if frugal else _BEHIND
    return Wish(
        prefetch=prefetch,
        pending=pending,
        block=None if config.block is None else max(1, config.block // element_bytes),
        in_host=config.in_host,
        checkpoint=config.checkpoint,
    )


def fitting(plan: Plan, shapes: Sequence[Shape], path: str) -> Plan:
    """Return a plan of ``path`` for the units of a model.

    Raises:
        ConfigError: It is one for another model.
    """
    there = [(unit.name, unit.numel) for unit in plan.units]
    here = [(shape.name, shape.numel) for shape in shapes]
    if there != here:
        pairs = [pair for pair in zip(there, here, strict=False) if pair[0] != pair[1]]
        first = f": {pairs[0][0]} there, {pairs[0][1]} here" if pairs else ""
        raise ConfigError(
            f"{path} is a plan for {len(there)} units, the model has {len(here)}{first}; make it "
            "anew for this model and strategy.unit"
        )
    # Which units are used again is the model's to say, not the file's.
    units = zip(plan.units, shapes, strict=True)
    return plan.replace(
        units=tuple(u.model_copy(update={"used_often": s.used_often}) for u, s in units)
    )
