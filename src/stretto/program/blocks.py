"""The ways to cut a model into blocks of parameters that travel together.

- *Buckets* (`cut_buckets`) follow the order of backward and the size that a link likes.
- *Segments* (`cut_segments`) follow the modules: "whole"; "coarse", one segment per child of the
  model; "fine", also one per block in a list of blocks; "balanced 8", eight of about equal bytes.
- *Fragments* (`cut_fragments`) are balanced segments that take turns.
- *Units* of sharded runs follow the calls of a forward: see `stretto.planner.model_units`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from stretto.errors import ConfigError

NamedParameter = tuple[str, nn.Parameter]
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


# --- buckets ---


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Size and kind of one tensor, as `cut_buckets` needs them."""

    num_bytes: int
    kind: tuple[torch.dtype, torch.device]
    """All tensors of a bucket are of one kind."""


def cut_buckets(tensors: Sequence[TensorInfo], bucket_bytes: int) -> tuple[int, ...]:
    """Return how many consecutive tensors go into each bucket, in the order given.

    A new bucket begins at a tensor that would exceed the threshold, and where type or device
    changes. A tensor larger than the threshold has a bucket to itself. The threshold is an eighth
    of ``bucket_bytes`` for the first bucket and doubles with each bucket, up to ``bucket_bytes``.
    Small first buckets start communication soon after backward begins.
    """
    bucket_lengths: list[int] = []
    filled, threshold = 0, bucket_bytes / 16
    for index, info in enumerate(tensors):
        fits = filled + info.num_bytes <= threshold
        if bucket_lengths and fits and info.kind == tensors[index - 1].kind:
            bucket_lengths[-1] += 1
            filled += info.num_bytes
        else:
            bucket_lengths.append(1)
            filled, threshold = info.num_bytes, min(bucket_bytes, 2 * threshold)
    return tuple(bucket_lengths)


def parameters_in_backward_order(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters, the last used first: in reverse order of registration."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return trainable[::-1]


# --- segments ---


def cut_segments(model: nn.Module, spec: str) -> list[list[NamedParameter]]:
    """Return the trainable parameters of each segment, in registration order.

    Raises:
        ConfigError: ``spec`` is unknown, or the model has fewer parameters than segments.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    word, _, count = spec.partition(" ")
    if word == "balanced" and count.isdecimal() and int(count) >= 1:
        segment_keys = _balanced([p.nbytes for _, p in named], int(count))
    elif spec in _SEGMENT_KEYS:
        segment_keys = _SEGMENT_KEYS[spec](model, [name for name, _ in named])
    else:
        raise ConfigError(
            f"strategy.segments = {spec!r}: expected {', '.join(_SEGMENT_KEYS)}, or balanced 8"
        )
    return _group_neighbours(named, segment_keys)


def check_segments(spec: str) -> str:
    """Return ``spec`` if it names a way to cut segments.

    Raises:
        ConfigError: It does not.
    """
    cut_segments(nn.Linear(1, 1) if spec in _SEGMENT_KEYS else nn.Sequential(), spec)
    return spec


def _group_neighbours(
    named: Sequence[NamedParameter], segment_keys: Sequence[object]
) -> list[list[NamedParameter]]:
    """Group consecutive parameters with equal key, type and device."""
    groups: list[list[NamedParameter]] = []
    last: object = None
    for (name, parameter), segment_key in zip(named, segment_keys, strict=True):
        key = (segment_key, parameter.dtype, parameter.device)
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
    """Return the path of the outermost module around a parameter that is not a list of blocks."""
    path: list[str] = []
    module = model
    for part in name.split(".")[:-1]:
        module = module.get_submodule(part)
        path.append(part)
        if not _has_blocks(module):
            break
    return ".".join(path)


def _has_blocks(module: nn.Module) -> bool:
    """Return whether a module is a list of blocks: a container of modules with children."""
    parts = module.children() if isinstance(module, _CONTAINERS) else ()
    return any(next(part.children(), None) is not None for part in parts)


_SEGMENT_KEYS: dict[str, Callable[[nn.Module, Sequence[str]], list[object]]] = {
    "whole": _whole,
    "coarse": _coarse,
    "fine": _fine,
}


def _balanced(sizes: Sequence[int], count: int) -> list[object]:
    """Return the segment index of each parameter, such that no segment is empty."""
    if sizes and count > len(sizes):
        raise ConfigError(
            f"strategy.segments = 'balanced {count}': the model has {len(sizes)} trainable "
            f"parameters, none of which is cut: at most balanced {len(sizes)}"
        )
    total, segment_keys = sum(sizes), list[object]()
    for index, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        target = int((end - size / 2) * count / total)
        before = int(str(segment_keys[-1])) if segment_keys else -1
        lowest_allowed = count - (len(sizes) - index)
        segment_keys.append(
            max(min(target, before + 1), before if segment_keys else 0, lowest_allowed)
        )
    return segment_keys


# --- fragments ---


def cut_fragments(model: nn.Module, count: int) -> list[tuple[int, list[NamedParameter]]]:
    """Return the fragments of ``model``, of about equal bytes, each with its due index.

    The due index, from 0 to ``count - 1``, says when a fragment is exchanged. Parameters of
    different types are in different fragments, so that several may share a due index.

    Raises:
        ConfigError: The model has fewer than ``count`` trainable parameters.
    """
    trainable = sum(p.requires_grad for p in model.parameters())
    if trainable and count > trainable:
        raise ConfigError(
            f"strategy.fragments = {count}: the model has {trainable} trainable parameters, none "
            f"of which is cut: take at most {trainable}"
        )
    cut = cut_segments(model, f"balanced {count}")
    return [(index * count // len(cut), named) for index, named in enumerate(cut)]
