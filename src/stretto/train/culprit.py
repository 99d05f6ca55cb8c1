"""Where a number that is none first appears: the layer, found by running forward once more.

Only the rank whose loss was not finite can tell; where there is one model, all ranks are told the
same words.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from stretto.comm.buckets import order_of_backward
from stretto.comm.small import gather_text
from stretto.data.loader import LoadedShare
from stretto.model.loss import per_sample_loss
from stretto.train.parts import Parts
from stretto.train.state import first_not_finite
from stretto.train.step import forward, micro_batches, seed_randomness

T = TypeVar("T")


def name_culprit(parts: Parts, step: int, batch: LoadedShare, *, mine: bool) -> str:
    """Return who met what where, in the same words on every rank; all ranks call this together.

    ``mine`` says that this rank's own loss was not finite; if no rank's was, gradients are.
    """
    if not any(_told(mine, parts)):
        return find_in_gradients(parts)
    parts.strategy.settle()  # forward may need what other ranks keep
    told = _told(find_in_forward(parts, step, batch) if mine else "", parts)
    blamed = [f"rank {rank}: {words}" for rank, words in enumerate(told) if words]
    more = f" ({len(blamed)} ranks in all)" if len(blamed) > 1 else ""
    return blamed[0] + more


def find_in_gradients(parts: Parts) -> str:
    """Return the parameter whose gradient is the first, as backward goes, that is not finite.

    Every rank looks at what it has of them; all ranks call this together.
    """
    return _first_of(parts, {name for names in _told(_bad(parts), parts) for name in names})


def name_own_culprit(parts: Parts, step: int, batch: LoadedShare, *, mine: bool) -> str:
    """Return what this rank has met where, as `name_culprit` does, and ask nobody.

    For ranks with models of their own, each of which leaves out its own steps.
    """
    if mine:
        return find_in_forward(parts, step, batch)
    return _first_of(parts, set(_bad(parts)))


def _bad(parts: Parts) -> list[str]:
    """Return the parameters of which this rank has a gradient that is not finite."""
    named = parts.strategy.named_gradients()
    return sorted({name for name, gradient in named if not _is_finite(gradient)})


def _first_of(parts: Parts, bad: set[str]) -> str:
    for name, _ in order_of_backward(parts.model):
        if name in bad:
            return f"losses are finite, the gradient of {name} is not"
    return "losses are finite, and so is every gradient by now"


def _told(mine: T, parts: Parts) -> list[T]:
    """Return what every rank says, in the order of ranks; all ranks together."""
    return [json.loads(text) for text in gather_text(json.dumps(mine), parts.channel)]


@torch.no_grad()
def find_in_forward(parts: Parts, step: int, batch: LoadedShare) -> str:
    """Run this rank's forward of ``step`` again, and return where it first leaves the numbers."""
    if not _is_finite(batch.inputs):
        return "the samples themselves are not finite"
    if name := first_not_finite(parts.model):
        return f"parameter {name} was not finite before forward"
    for micro, (inputs, targets) in enumerate(micro_batches(parts, batch)):
        if not len(inputs):
            continue
        seed_randomness(parts.seed, step, micro, parts.channel.rank)
        with _watching(parts.model) as seen:
            smoothing = parts.config.label_smoothing
            losses = per_sample_loss(forward(parts, inputs), targets, smoothing)
        if seen:
            name, kind = next(iter(seen.items()))
            return f"layer {name} ({kind}) gives the first output that is not finite"
        if not _is_finite(losses):
            return "every layer's output is finite, the loss is not"
    return "the loss was not finite, but is when it is computed again"


@contextmanager
def _watching(model: nn.Module) -> Iterator[Mapping[str, str]]:
    """Yield the layers, innermost and in the order they ran, with an output that is not finite."""
    seen: dict[str, str] = {}

    def look(name: str, module: nn.Module, output: object) -> None:
        tensors = output if isinstance(output, tuple | list) else (output,)
        if any(isinstance(t, Tensor) and not _is_finite(t) for t in tensors):
            seen.setdefault(name or "the model itself", type(module).__name__)

    hooks = [
        module.register_forward_hook(lambda m, _inputs, output, name=name: look(name, m, output))
        for name, module in model.named_modules()
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
