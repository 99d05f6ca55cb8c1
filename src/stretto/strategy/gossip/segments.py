"""Segments: stretches of a model's parameters, each of which is mixed on its own.

Named by one word: "whole"; "coarse", cut where the model's own parts change; "fine", where blocks
inside a list of blocks do; "balanced 8", eight of about as many bytes.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from torch import nn

from stretto.errors import ConfigError

Named = tuple[str, nn.Parameter]
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def cut_segments(model: nn.Module, how: str) -> list[list[Named]]:
    """Return the trainable parameters of each segment, in the order in which they were registered.

    Raises:
        ConfigError: There is no such cut, or the model has fewer parameters than segments.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    word, _, count = how.partition(" ")
    if word == "balanced" and count.isdecimal() and int(count) >= 1:
        places = _balanced([p.nbytes for _, p in named], int(count))
    elif how in _PLACES:
        places = _PLACES[how](model, [name for name, _ in named])
    else:
        raise ConfigError(
            f"strategy.segments = {how!r}: expected {', '.join(_PLACES)}, or balanced 8"
        )
    return _groups(named, places)


def check_cut(how: str) -> str:
    """Return a cut that exists.

    Raises:
        ConfigError: It does not.
    """
    cut_segments(nn.Linear(1, 1) if how in _PLACES else nn.Sequential(), how)
    return how


def _groups(named: Sequence[Named], places: Sequence[object]) -> list[list[Named]]:
    """Return neighbours of one place together; those of another type or device are apart."""
    groups: list[list[Named]] = []
    last: object = None
    for (name, parameter), place in zip(named, places, strict=True):
        key = (place, parameter.dtype, parameter.device)
        if not groups or key != last:
            groups.append([])
        groups[-1].append((name, parameter))
        last = key
    return groups


def _whole(_model: nn.Module, names: Sequence[str]) -> list[object]:
    return [0] * len(names)


def _coarse(_model: nn.Module, names: Sequence[str]) -> list[object]:
    return [name.partition(".")[0] for name in names]


def _fine(model: nn.Module, names: Sequence[str]) -> list[object]:
    return [_block_of(model, name) for name in names]


def _block_of(model: nn.Module, name: str) -> str:
    """Return the first part of a model on the way to a parameter that is no list of blocks."""
    path: list[str] = []
    module = model
    for word in name.split(".")[:-1]:
        module = module.get_submodule(word)
        path.append(word)
        if not _has_blocks(module):
            break
    return ".".join(path)


def _has_blocks(module: nn.Module) -> bool:
    """Say whether a module is a list of parts that have parts themselves; else it is a block."""
    parts = module.children() if isinstance(module, _CONTAINERS) else ()
    return any(next(part.children(), None) is not None for part in parts)


_PLACES: dict[str, Callable[[nn.Module, Sequence[str]], list[object]]] = {
    "whole": _whole,
    "coarse": _coarse,
    "fine": _fine,
}


def _balanced(sizes: Sequence[int], count: int) -> list[object]:
    """Return to which of ``count`` segments each parameter goes: none is empty."""
    if sizes and count > len(sizes):
        raise ConfigError(
            f"strategy.segments = 'balanced {count}': the model has {len(sizes)} trainable "
            f"parameters, none of which is cut: at most balanced {len(sizes)}"
        )
    total, places = sum(sizes), list[object]()
    for index, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        wished = int((end - size / 2) * count / total)
        before = int(str(places[-1])) if places else -1
        most_left = count - (len(sizes) - index)
        places.append(max(min(wished, before + 1), before if places else 0, most_left))
    return places
