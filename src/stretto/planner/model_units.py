"""Divide a model into units: groups of modules that are unsharded, used and reduced as one.

Each child of a container (`nn.Sequential`, `nn.ModuleList`, `nn.ModuleDict`) is a unit, and so is
each module beside the containers. Small neighbouring units are joined.

Units are assumed to run in the order in which their modules were registered. If the calls of a
forward are known (`called_modules`):

- The units have the order of these calls.
- The last unit is split finer, because all ranks wait for its unshard and its first gradient.
- A module whose parameters are used without a call belongs to the module around it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from stretto.errors import ConfigError
from stretto.planner.presets import UnitShape

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LARGE_SHARE = 1 / 4
"""A module with containers inside and more than this share of the model's parameters is split.

Repeated modules of a container are never split: they are the layers of the model.
"""


@dataclass(frozen=True, slots=True)
class ModelUnit:
    """Consecutive modules of the model, with their parameters."""

    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    """The names of the parameters in the model."""
    used_often: bool = False
    """Whether its parameters are also used after its own forward."""
    always_active: bool = False
    """Whether its parameters may be used during the whole forward.

    The start of their backward is then unknown.
    """

    @property
    def numel(self) -> int:
        """The number of trainable elements."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def shape(self) -> UnitShape:
        """The properties that a plan needs."""
        return UnitShape(self.name, self.numel, self.used_often)


class _ModulePart(NamedTuple):
    """A module, or only its direct parameters."""

    name: str
    module: nn.Module
    direct_parameters_only: bool = False
    enclosing_module: nn.Module | None = None
    """The module that is called instead, if this one is used without a call."""

    @property
    def numel(self) -> int:
        """The number of elements of its parameters."""
        return sum(
            p.numel() for p in self.module.parameters(recurse=not self.direct_parameters_only)
        )


def called_modules(model: nn.Module, run: Callable[[], object]) -> tuple[str, ...]:
    """Return the names of the modules that ``run`` calls, in the order of their first call."""
    called: dict[str, None] = {}

    def record(name: str) -> Callable[[nn.Module, object], None]:
        return lambda _module, _inputs: called.setdefault(name)

    hooks = [m.register_forward_pre_hook(record(name)) for name, m in model.named_modules()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(called)


def find_units(
    model: nn.Module, min_numel: int = 0, calls: Sequence[str] | None = None
) -> list[ModelUnit]:
    """Return the units of ``model`` in the order of forward.

    Args:
        model: The model.
        min_numel: Neighbouring units are joined until they have this many elements.
        calls: The modules that a forward calls, in order; None if unknown.

    Raises:
        ConfigError: The model has nothing to train, or a unit would mix dtypes or devices.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    if not names:
        raise ConfigError("the model has no trainable parameter: there is nothing to shard")
    parts = list(_iterate_parts(_ModulePart("", model), sum(p.numel() for p in model.parameters())))
    num_tail_parts = 0
    if calls is not None:
        parts, num_tail_parts = _in_call_order(model, parts, calls, min_numel)
    found, num_tail_parts = _units_from_parts(parts, names, num_tail_parts)
    num_coarse = len(found) - num_tail_parts
    joined = _join_small_units(found[:num_coarse], min_numel) + _join_small_units(
        found[num_coarse:], min_numel // 8
    )
    return _check_dtype_and_device(joined)


def _units_from_parts(
    parts: list[_ModulePart], names: Mapping[int, str], num_tail_parts: int
) -> tuple[list[ModelUnit], int]:
    """Return a unit for each part that owns parameters, and how many come from the last parts."""
    owners: dict[int, int] = {}
    found: list[ModelUnit] = []
    sharing_units: set[int] = set()
    for position, part in enumerate(parts):
        parameters: list[nn.Parameter] = []
        for parameter in part.module.parameters(recurse=not part.direct_parameters_only):
            if id(parameter) in owners:
                sharing_units.add(owners[id(parameter)])
            elif id(parameter) in names:
                owners[id(parameter)] = len(found)
                parameters.append(parameter)
        if parameters:
            parameter_names = tuple(names[id(p)] for p in parameters)
            always_active, name = (
                part.direct_parameters_only or part.enclosing_module is not None,
                part.name,
            )
            unit = ModelUnit(
                name or type(part.module).__name__,
                (part.enclosing_module or part.module,),
                tuple(parameters),
                parameter_names,
                always_active,
                always_active,
            )
            found.append(unit)
        elif position >= len(parts) - num_tail_parts:
            num_tail_parts -= 1
    marked = [
        replace(unit, used_often=unit.used_often or index in sharing_units)
        for index, unit in enumerate(found)
    ]
    return marked, num_tail_parts


def _iterate_parts(part: _ModulePart, total: int, repeated: bool = False) -> Iterator[_ModulePart]:
    name, module = part.name, part.module
    container = isinstance(module, _CONTAINERS)
    if name and not container and (repeated or not _is_large(module, total)):
        yield part
        return
    children = list(module.named_children())
    if not children:
        yield part
        return
    if next(module.parameters(recurse=False), None) is not None:
        yield _ModulePart(name, module, direct_parameters_only=True)
    kinds = Counter(type(child) for _, child in children)
    for child_name, child in children:
        child_part = _ModulePart(f"{name}.{child_name}".lstrip("."), child)
        yield from _iterate_parts(child_part, total, container and kinds[type(child)] > 1)


def _in_call_order(
    model: nn.Module, parts: list[_ModulePart], calls: Sequence[str], min_numel: int
) -> tuple[list[_ModulePart], int]:
    """Return the parts in call order, the last one split, and the number of parts of that split."""
    call_index = {name: index for index, name in enumerate(calls)}
    modules = dict(model.named_modules())
    indexed_parts: list[tuple[int, _ModulePart]] = []
    for part in parts:
        name = part.name
        while name not in call_index:  # used without a call: it belongs to the module around it
            name = name.rpartition(".")[0]
        enclosing_module = None if name == part.name else modules[name]
        indexed_parts.append((call_index[name], part._replace(enclosing_module=enclosing_module)))
    coarse = [part for _, part in sorted(indexed_parts, key=lambda pair: pair[0])]
    last = [coarse.pop()]
    while coarse and sum(part.numel for part in last) < min_numel:
        last.insert(0, coarse.pop())
    finer = [inner for part in last for inner in _split_finer(part, call_index)]
    return coarse + finer, len(finer)


def _split_finer(part: _ModulePart, call_index: Mapping[str, int]) -> list[_ModulePart]:
    """Return the innermost modules of a part in call order; the part if one is not called."""
    inner = [
        (f"{part.name}.{name}", module)
        for name, module in part.module.named_modules()
        if name and next(module.parameters(recurse=False), None) is not None
    ]
    has_nested_owner = any(next(m.children(), None) is not None for _, m in inner)
    has_direct_parameters = (
        part.direct_parameters_only or next(part.module.parameters(recurse=False), None) is not None
    )
    if (
        has_nested_owner
        or has_direct_parameters
        or part.enclosing_module is not None
        or not inner
        or any(name not in call_index for name, _ in inner)
    ):
        return [part]
    return [
        _ModulePart(name, module)
        for name, module in sorted(inner, key=lambda one: call_index[one[0]])
    ]


def _is_large(module: nn.Module, total: int) -> bool:
    numel = sum(p.numel() for p in module.parameters())
    has_containers = any(
        isinstance(below, _CONTAINERS) and len(below) > 1
        for below in module.modules()
        if below is not module
    )
    return has_containers and numel > _LARGE_SHARE * total


def _join_small_units(units: list[ModelUnit], min_numel: int) -> list[ModelUnit]:
    """Join neighbours until each unit has ``min_numel`` elements.

    Consecutive embeddings are always joined: position embeddings are often read without a call.
    Units that are used often or always active are joined only to such units; otherwise the others
    would have to stay whole as long as they do.
    """
    joined: list[ModelUnit] = []
    for unit in units:
        before = joined[-1] if joined else None
        if before is not None and _have_same_dtype_and_device(before, unit):
            is_small = before.numel < min_numel and _have_same_lifetime(before, unit)
            are_embeddings = all(
                isinstance(m, nn.Embedding) for m in (*before.modules, *unit.modules)
            )
            if is_small or are_embeddings:
                joined[-1] = _join_two(before, unit)
                continue
        joined.append(unit)
    if len(joined) > 1 and joined[-1].numel < min_numel:
        before, last = joined[-2:]
        if _have_same_dtype_and_device(before, last) and _have_same_lifetime(before, last):
            joined[-2:] = [_join_two(before, last)]
    return joined


def _have_same_lifetime(one: ModelUnit, other: ModelUnit) -> bool:
    return (one.used_often, one.always_active) == (other.used_often, other.always_active)


def _have_same_dtype_and_device(one: ModelUnit, other: ModelUnit) -> bool:
    first, second = one.parameters[0], other.parameters[0]
    return first.dtype == second.dtype and first.device == second.device


def _join_two(one: ModelUnit, other: ModelUnit) -> ModelUnit:
    return ModelUnit(
        f"{one.name}+{other.name}",
        one.modules + other.modules,
        one.parameters + other.parameters,
        one.names + other.names,
        one.used_often or other.used_often,
        one.always_active or other.always_active,
    )


def _check_dtype_and_device(units: list[ModelUnit]) -> list[ModelUnit]:
    for unit in units:
        for (name, one), (other_name, other) in pairwise(
            zip(unit.names, unit.parameters, strict=True)
        ):
            if one.dtype != other.dtype or one.device != other.device:
                raise ConfigError(
                    f"{name} is {one.dtype} on {one.device}, {other_name} {other.dtype} on "
                    f"{other.device}: a unit's parameters travel together and must be of one type"
                )
    return units
