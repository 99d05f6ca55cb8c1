"""A model's units: stretches of it that are gathered, used and reduced as one.

The children of containers (`nn.Sequential`, `nn.ModuleList`) are units, and so is whatever stands
beside them; small neighbours are joined. They are taken to run in the order in which they were
registered. Where somebody has seen a forward (`called_modules`), units have the order of that one;
the last one, at which all wait for the last gather and the first gradient, is cut finer; and what
was used without a call of its module belongs to the module around it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

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


class _Part(NamedTuple):
    """A module, or what is its own in it."""

    name: str
    module: nn.Module
    own_only: bool = False
    around: nn.Module | None = None
    """The module that is called, where this one is used without a call."""

    @property
    def numel(self) -> int:
        """Elements of its parameters."""
        return sum(p.numel() for p in self.module.parameters(recurse=not self.own_only))


def called_modules(model: nn.Module, run: Callable[[], object]) -> tuple[str, ...]:
    """Return the names of the modules that ``run`` calls, in the order of their first call."""
    called: dict[str, None] = {}

    def note(name: str) -> Callable[[nn.Module, object], None]:
        return lambda _module, _inputs: called.setdefault(name)

    hooks = [m.register_forward_pre_hook(note(name)) for name, m in model.named_modules()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(called)


def find_units(
    model: nn.Module, least_numel: int = 0, calls: Sequence[str] | None = None
) -> list[ModelUnit]:
    """Return the units of ``model`` in order, none below ``least_numel`` that has a neighbour.

    ``calls`` are the modules that a forward calls; without them, nothing is known of their order.

    Raises:
        ConfigError: There is nothing to train, or what is there cannot be cut into units.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    if not names:
        raise ConfigError("the model has no trainable parameter: there is nothing to shard")
    parts = list(_parts(_Part("", model), sum(p.numel() for p in model.parameters())))
    tail = 0
    if calls is not None:
        parts, tail = _as_called(model, parts, calls, least_numel)
    found, tail = _owned(parts, names, tail)
    fine = len(found) - tail
    joined = _joined(found[:fine], least_numel) + _joined(found[fine:], least_numel // 8)
    return _checked(joined)


def _owned(parts: list[_Part], names: Mapping[int, str], tail: int) -> tuple[list[ModelUnit], int]:
    """Return a unit for each part that owns something, and how many of them are the last parts'."""
    owners: dict[int, int] = {}
    found: list[ModelUnit] = []
    shared: set[int] = set()
    for position, part in enumerate(parts):
        parameters: list[nn.Parameter] = []
        for parameter in part.module.parameters(recurse=not part.own_only):
            if id(parameter) in owners:
                shared.add(owners[id(parameter)])
            elif id(parameter) in names:
                owners[id(parameter)] = len(found)
                parameters.append(parameter)
        if parameters:
            told = tuple(names[id(p)] for p in parameters)
            spread, name = part.own_only or part.around is not None, part.name
            unit = ModelUnit(
                name or type(part.module).__name__,
                (part.around or part.module,),
                tuple(parameters),
                told,
                spread,
                spread,
            )
            found.append(unit)
        elif position >= len(parts) - tail:
            tail -= 1
    marked = [
        replace(unit, used_often=unit.used_often or index in shared)
        for index, unit in enumerate(found)
    ]
    return marked, tail


def _parts(part: _Part, total: int, repeated: bool = False) -> Iterator[_Part]:
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
        yield _Part(name, module, own_only=True)
    kinds = Counter(type(child) for _, child in children)
    for child_name, child in children:
        inside = _Part(f"{name}.{child_name}".lstrip("."), child)
        yield from _parts(inside, total, container and kinds[type(child)] > 1)


def _as_called(
    model: nn.Module, parts: list[_Part], calls: Sequence[str], least_numel: int
) -> tuple[list[_Part], int]:
    """Return the parts in the order of ``calls``, the last cut finer, and how many that makes."""
    place = {name: index for index, name in enumerate(calls)}
    modules = dict(model.named_modules())
    placed: list[tuple[int, _Part]] = []
    for part in parts:
        name = part.name
        while name not in place:  # used without a call: it belongs to whoever was called
            name = name.rpartition(".")[0]
        around = None if name == part.name else modules[name]
        placed.append((place[name], part._replace(around=around)))
    coarse = [part for _, part in sorted(placed, key=lambda pair: pair[0])]
    last = [coarse.pop()]
    while coarse and sum(part.numel for part in last) < least_numel:
        last.insert(0, coarse.pop())
    finer = [inner for part in last for inner in _finer(part, place)]
    return coarse + finer, len(finer)


def _finer(part: _Part, place: Mapping[str, int]) -> list[_Part]:
    """Return the innermost modules of a part that are called, in order; itself if one is not."""
    inner = [
        (f"{part.name}.{name}", module)
        for name, module in part.module.named_modules()
        if name and next(module.parameters(recurse=False), None) is not None
    ]
    atomic = any(next(m.children(), None) is not None for _, m in inner)
    own = part.own_only or next(part.module.parameters(recurse=False), None) is not None
    if (
        atomic
        or own
        or part.around is not None
        or not inner
        or any(name not in place for name, _ in inner)
    ):
        return [part]
    return [_Part(name, module) for name, module in sorted(inner, key=lambda one: place[one[0]])]


def _is_large(module: nn.Module, total: int) -> bool:
    numel = sum(p.numel() for p in module.parameters())
    holds = any(
        isinstance(below, _CONTAINERS) and len(below) > 1
        for below in module.modules()
        if below is not module
    )
    return holds and numel > _LARGE * total


def _joined(units: list[ModelUnit], least_numel: int) -> list[ModelUnit]:
    """Join neighbours until each has ``least_numel`` elements.

    Embeddings that follow each other are one in any case: positions are often read, not called.
    What is used often, or nobody knows when, is not joined to what is not: all would stay for it.
    """
    joined: list[ModelUnit] = []
    for unit in units:
        before = joined[-1] if joined else None
        if before is not None and _same_kind(before, unit):
            small = before.numel < least_numel and _stay_as_long(before, unit)
            embeds = all(isinstance(m, nn.Embedding) for m in (*before.modules, *unit.modules))
            if small or embeds:
                joined[-1] = _together(before, unit)
                continue
        joined.append(unit)
    if len(joined) > 1 and joined[-1].numel < least_numel:
        before, last = joined[-2:]
        if _same_kind(before, last) and _stay_as_long(before, last):
            joined[-2:] = [_together(before, last)]
    return joined


def _stay_as_long(one: ModelUnit, other: ModelUnit) -> bool:
    return (one.used_often, one.spread) == (other.used_often, other.spread)


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
