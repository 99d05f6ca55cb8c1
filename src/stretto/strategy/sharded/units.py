"""A model's units: stretches of it that are gathered, used and reduced as one.

Without a plan that names them, the children of containers (`nn.Sequential`, `nn.ModuleList`) are
units, and so is whatever stands beside them; small neighbours are joined. They are taken to run in
the order in which they were registered.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import nn

from stretto.errors import ConfigError
from stretto.plan.presets import Shape

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LARGE = 1 / 4
"""A module with so much of the model's parameters, and containers inside, is not one unit, unless
it is one of several of its kind in a container: those are what models are made of."""


@dataclass(frozen=True, slots=True)
class ModelUnit:
    """Modules of the model that follow each other, and the parameters that are theirs."""

    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    """Of the parameters, in the model."""
    used_often: bool = False
    """Whether its parameters are used after its own forward, too."""
    spread: bool = False
    """Whether some are used all through a forward: nobody can say when their backward begins."""

    @property
    def numel(self) -> int:
        """Trainable elements."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def shape(self) -> Shape:
        """What a plan must know of it."""
        return Shape(self.name, self.numel, self.used_often)


def find_units(model: nn.Module, least_numel: int = 0) -> list[ModelUnit]:
    """Return the units of ``model`` in order, none below ``least_numel`` that has a neighbour.

    Raises:
        ConfigError: There is nothing to train, or what is there cannot be cut into units.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    if not names:
        raise ConfigError("the model has no trainable parameter: there is nothing to shard")
    owners: dict[int, int] = {}
    found: list[ModelUnit] = []
    shared: set[int] = set()
    for name, module, own_only in _pieces(model, "", sum(p.numel() for p in model.parameters())):
        parameters: list[nn.Parameter] = []
        for parameter in module.parameters(recurse=not own_only):
            if id(parameter) not in names:
                continue
            if id(parameter) in owners:
                shared.add(owners[id(parameter)])
                continue
            owners[id(parameter)] = len(found)
            parameters.append(parameter)
        if parameters:
            told = tuple(names[id(p)] for p in parameters)
            found.append(ModelUnit(name, (module,), tuple(parameters), told, own_only, own_only))
    marked = [_marked(unit, index in shared) for index, unit in enumerate(found)]
    return _checked(_joined(marked, least_numel))


def _pieces(
    module: nn.Module, name: str, total: int, repeated: bool = False
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield name, module and whether only its own parameters are meant."""
    root, container = not name, isinstance(module, _CONTAINERS)
    if not (root or container or (not repeated and _is_large(module, total))):
        yield name, module, False
        return
    children = list(module.named_children())
    if not children:
        yield name or type(module).__name__, module, False
        return
    if next(module.parameters(recurse=False), None) is not None:
        yield name or type(module).__name__, module, True
    kinds = Counter(type(child) for _, child in children)
    for child_name, child in children:
        repeated = container and kinds[type(child)] > 1
        yield from _pieces(child, f"{name}.{child_name}".lstrip("."), total, repeated)


def _is_large(module: nn.Module, total: int) -> bool:
    numel = sum(p.numel() for p in module.parameters())
    holds = any(
        isinstance(below, _CONTAINERS) and len(below) > 1
        for below in module.modules()
        if below is not module
    )
    return holds and numel > _LARGE * total


def _marked(unit: ModelUnit, shared: bool) -> ModelUnit:
    return replace(unit, used_often=unit.used_often or shared)


def _joined(units: list[ModelUnit], least_numel: int) -> list[ModelUnit]:
    """Join neighbours until each has ``least_numel`` elements.

    Embeddings that follow each other are one in any case: positions are often read, not called.
    """
    joined: list[ModelUnit] = []
    for unit in units:
        before = joined[-1] if joined else None
        if before is not None and _same_kind(before, unit):
            small = before.numel < least_numel
            embeds = all(isinstance(m, nn.Embedding) for m in (*before.modules, *unit.modules))
            if small or embeds:
                joined[-1] = _together(before, unit)
                continue
        joined.append(unit)
    if len(joined) > 1 and joined[-1].numel < least_numel and _same_kind(*joined[-2:]):
        joined[-2:] = [_together(*joined[-2:])]
    return joined


def _same_kind(one: ModelUnit, other: ModelUnit) -> bool:
    first, second = one.parameters[0], other.parameters[0]
    return first.dtype == second.dtype and first.device == second.device


def _together(one: ModelUnit, other: ModelUnit) -> ModelUnit:
    return ModelUnit(
        f"{one.name}+{other.name}",
        one.modules + other.modules,
        one.parameters + other.parameters,
        one.names + other.names,
        one.used_often or other.used_often,
        one.spread or other.spread,
    )


def _checked(units: list[ModelUnit]) -> list[ModelUnit]:
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
