"""Settings of the sharded strategy, and the plan that they select."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from torch import nn

from stretto.collectives.algorithm_table import parse_algorithm
from stretto.collectives.algorithms import ALL_GATHER, REDUCE_SCATTER
from stretto.config import Config
from stretto.errors import ConfigError
from stretto.planner.check import check
from stretto.planner.model_units import ModelUnit, find_units
from stretto.planner.plan import Plan, read_plan
from stretto.planner.presets import PLAN_PRESETS, PresetOptions, UnitShape, preset_plan, random_plan
from stretto.planner.profile import read_profile
from stretto.planner.timing import check_same_units
from stretto.units import Bytes

AUTO = "auto"
DEFAULT_UNIT_BYTES = 2_000_000
"""Default size of a unit: neighbouring modules are joined until a unit has this many bytes."""
_ZERO3_PREFETCH, _REDUCE_SLACK = 1, 3
"""Defaults that measured best: the units that zero3 unshards ahead, and the slots within which the
other plans finish a reduction. zero3 allows one slot only, to save memory."""
_PARTS = (1, 2, 4, 8, 16)
"""Numbers of equal parts that a block can be sent in: they divide `comm.shard_layout.ALIGN`."""


class ShardedConfig(Config):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"sharded"``."""

    kind: Literal["sharded"] = "sharded"
    plan: str = "zero2"
    """What is sharded and when it is sent: "ddp", "zero1", "zero2", "zero3", "dear", "random 7" (a
    valid random plan from seed 7), or a plan file (.json)."""
    memory: Bytes | None = None
    """Memory limit of a rank, activations included. When set, the run makes a plan for it at the
    start instead of using ``plan``, from a profile or an estimate of the model."""
    profile: str | None = None
    """File written by stretto profile; ``memory`` plans from it."""
    cluster: str | None = None
    """Without a profile: the links to estimate for, as a file of stretto calibrate or a name."""
    device: str = "cpu"
    """Without a profile: the device to estimate for, as cpu, h200, or operations and bytes per
    second such as "3e14,2e12"."""
    prefetch: int | None = Field(default=None, ge=0)
    """Number of units ahead of the running one whose parameters may be unsharded. When not set: 1
    for zero3, unlimited for the other plans."""
    reduce_slots: int | None = Field(default=None, ge=0)
    """Slots that a gradient's reduction may take before backward waits for it. When not set: 3, or
    1 for zero3, if a forward was traced before (stretto train); otherwise no limit."""
    unit: Bytes | None = None
    """Least bytes of a unit: smaller neighbouring modules are joined. When not set: the size that
    the plan file or the profile was made with, else 2 MB."""
    block: Bytes | None = None
    """Most bytes of a block; larger units are sent in several blocks. When not set, one block."""
    checkpoint: bool = False
    """Whether backward recomputes activations instead of keeping them."""
    in_host: bool = False
    """Whether units are sharded within each host only, so that every host has a full copy."""
    algorithm: str = "auto"
    """Algorithm of reduce-scatter and all-gather: "ring", "ring/2", "hierarchical/4"; "auto" picks
    one for the mesh."""
    wire: Literal["own", "fp32", "bf16", "fp16"] = "own"
    """The type that gradients are sent as."""
    parameters: Literal["own", "bf16", "fp16"] = "own"
    """The type that parameters are gathered and computed with; updates use the model's own type."""

    @model_validator(mode="after")
    def _check_keys_have_an_effect(self) -> Self:
        """Refuse keys that this combination would ignore; resolved run files hold the defaults."""
        from_file = self.memory is None and _is_file(self.plan)
        estimates = self.memory is not None and self.profile is None
        for key, is_read, why in (
            ("prefetch", not from_file, f"the plan file {self.plan} already says it"),
            ("reduce_slots", not from_file, f"the plan file {self.plan} already says it"),
            ("block", not from_file, f"the plan file {self.plan} already says it"),
            ("in_host", not from_file, f"the plan file {self.plan} already says it"),
            ("device", estimates, "it is read only with memory and without a profile"),
            ("cluster", estimates, "it is read only with memory and without a profile"),
        ):
            if not is_read and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} would be ignored: {why}; leave {key} out")
        return self

    @field_validator("algorithm")
    @classmethod
    def _check_algorithm(cls, text: str) -> str:
        if text != AUTO:
            try:
                _, parts = parse_algorithm(
                    text, [name for name in REDUCE_SCATTER if name in ALL_GATHER]
                )
            except ConfigError as wrong:
                raise ValueError(str(wrong)) from None
            if parts not in _PARTS:
                raise ValueError("blocks are sent in 1, 2, 4, 8 or 16 parts")
        return text


def checked_plan(
    config: ShardedConfig, model: nn.Module, calls: Sequence[str] | None = None
) -> Plan:
    """Return a checked plan for ``model`` before the optimizer is known.

    With ``memory`` set the real plan is made at the start of the run; the result is then zero2, a
    stand-in with the same units.
    """
    units = units_of(config, model, calls)
    if config.memory is not None:
        check_profile_source(config, [unit.shape for unit in units])
        config = config.model_copy(update={"plan": "zero2"})
    return plan_for(config, units, whole_layers=False, order_is_known=calls is not None)


def units_of(
    config: ShardedConfig, model: nn.Module, calls: Sequence[str] | None = None
) -> list[ModelUnit]:
    """Return the units of ``model``; ``calls`` names the modules that a forward calls, in order."""
    return find_units(model, unit_bytes(config) // _element_bytes(model), calls)


def unit_bytes(config: ShardedConfig) -> int:
    """Return the least bytes of a unit: from the settings, the plan file, the profile or 2 MB."""
    if config.unit is not None:
        return config.unit
    made_with = None
    if config.memory is not None and config.profile is not None:
        made_with = read_profile(Path(config.profile)).unit_bytes
    elif config.memory is None and _is_file(config.plan):
        made_with = read_plan(Path(config.plan)).unit_bytes
    return made_with or DEFAULT_UNIT_BYTES


def _is_file(plan: str) -> bool:
    return Path(plan).suffix == ".json"


def _element_bytes(model: nn.Module) -> int:
    return next((p.element_size() for p in model.parameters() if p.requires_grad), 4)


def plan_for(
    config: ShardedConfig, units: Sequence[ModelUnit], *, whole_layers: bool, order_is_known: bool
) -> Plan:
    """Return the checked plan that ``config.plan`` selects for ``units``.

    Args:
        config: The strategy's settings.
        units: The model's units.
        whole_layers: The optimizer needs all blocks of a unit before it updates one.
        order_is_known: The units are in the order of a forward that was traced.

    Raises:
        ConfigError: There is no such preset, or the plan file is for another model.
    """
    shapes = [unit.shape for unit in units]
    element_bytes = units[0].parameters[0].element_size()
    word, _, seed = config.plan.partition(" ")
    if word in PLAN_PRESETS and not seed:
        preset_options = _preset_options(config, word, element_bytes, order_is_known)
        plan = preset_plan(word, shapes, replace(preset_options, whole_layers=whole_layers))
    elif word == "random" and (seed or "0").isdecimal():
        plan = random_plan(shapes, int(seed or 0), whole_layers=whole_layers)
    elif _is_file(config.plan):
        plan = adapt_plan(read_plan(Path(config.plan)), shapes, config.plan)
        plan = plan.replace(whole_layers=plan.whole_layers or whole_layers)
    else:
        presets = ", ".join([*PLAN_PRESETS, "random SEED"])
        raise ConfigError(
            f"strategy.plan = {config.plan!r}: known are {presets}, or a file that ends in .json"
        )
    check(plan)
    return plan


def check_profile_source(config: ShardedConfig, shapes: Sequence[UnitShape]) -> None:
    """Check that a profile or an estimate is available to make a plan from at the start.

    Raises:
        ConfigError: Neither profile nor cluster is set, or the profile is of another model.
    """
    if config.profile is None and config.cluster is None:
        raise ConfigError(
            "strategy.memory: a plan needs to know what the model and the links take; set "
            "strategy.profile, a file of stretto profile, or strategy.cluster, a file of stretto "
            "calibrate or a name, for an estimate"
        )
    if config.profile is not None:
        check_same_units(read_profile(Path(config.profile)), shapes, config.profile)


def _preset_options(
    config: ShardedConfig, word: str, element_bytes: int, order_is_known: bool
) -> PresetOptions:
    is_zero3 = word == "zero3"
    prefetch = _ZERO3_PREFETCH if config.prefetch is None and is_zero3 else config.prefetch
    # A rank that runs ahead takes CPU cores from the ranks that it then waits for, so reductions
    # have a deadline by default. A deadline in backward needs a known order of the units.
    reduce_slots = config.reduce_slots
    if reduce_slots is None and order_is_known:
        reduce_slots = 1 if is_zero3 else _REDUCE_SLACK
    return PresetOptions(
        prefetch=prefetch,
        reduce_slots=reduce_slots,
        block=None if config.block is None else max(1, config.block // element_bytes),
        in_host=config.in_host,
        checkpoint=config.checkpoint,
    )


def adapt_plan(plan: Plan, shapes: Sequence[UnitShape], path: str) -> Plan:
    """Return ``plan``, read from ``path``, with ``used_often`` set from the model's units.

    Raises:
        ConfigError: The plan is for another model.
    """
    plan_units = [(unit.name, unit.numel) for unit in plan.units]
    model_units = [(shape.name, shape.numel) for shape in shapes]
    if plan_units != model_units:
        pairs = [pair for pair in zip(plan_units, model_units, strict=False) if pair[0] != pair[1]]
        first = f": {pairs[0][0]} there, {pairs[0][1]} here" if pairs else ""
        raise ConfigError(
            f"{path} is a plan for {len(plan_units)} units, the model has {len(model_units)}"
            f"{first}; make it anew for this model and strategy.unit"
        )
    # The model, not the file, decides which units are used more than once.
    units = zip(plan.units, shapes, strict=True)
    return plan.replace(
        units=tuple(u.model_copy(update={"used_often": s.used_often}) for u, s in units)
    )
