"""Buckets: several gradients that travel as one message.

Small tensors are fused up to a threshold because a message costs latency; a bucket may leave as
soon as backward has produced its last gradient, so buckets follow the order of backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WIRE: dict[str, torch.dtype | None] = {
    "own": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""What gradients travel as; "own" is the gradient's own type."""


def checked_type(word: str) -> str:
    """Return the name of a type in which something may travel.

    Raises:
        ValueError: There is none of that name.
    """
    if word not in WIRE:
        raise ValueError(f"expected {', '.join(WIRE)}, got {word!r}")
    return word


@dataclass(frozen=True, slots=True)
class Piece:
    """What `cut_buckets` needs to know of one tensor."""

    num_bytes: int
    kind: tuple[torch.dtype, torch.device]


def cut_buckets(pieces: Sequence[Piece], fusion_bytes: int) -> tuple[int, ...]:
    """Return how many consecutive tensors go into each bucket, in the order given.

    A bucket is closed before a tensor that would push it over the threshold, and where type or
    device changes; a tensor larger than the threshold travels alone. The threshold begins at an
    eighth of ``fusion_bytes`` and doubles with each bucket: the wire has work soon after backward
    begins, and large messages as soon as it is busy.
    """
    cuts: list[int] = []
    filled, threshold = 0, fusion_bytes / 16
    for index, piece in enumerate(pieces):
        fits = filled + piece.num_bytes <= threshold
        if cuts and fits and piece.kind == pieces[index - 1].kind:
            cuts[-1] += 1
            filled += piece.num_bytes
        else:
            cuts.append(1)
            filled, threshold = piece.num_bytes, min(fusion_bytes, 2 * threshold)
    return tuple(cuts)


def order_of_backward(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters, last used first: the reverse of registration."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return trainable[::-1]


class Bucket:
    """The flat home of a few gradients, in the type they travel in.

    Behind the gradients lies one element per parameter, its *mark*: 1 where this rank has a
    gradient, else 0. The sum of the marks says whether anybody had one, so a parameter that no
    rank used keeps no gradient at all, exactly as it would on one rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], wire: torch.dtype | None) -> None:
        self.parameters = tuple(parameters)
        self._sizes = [p.numel() for p in parameters]
        first = self.parameters[0]
        numel = sum(self._sizes)
        self.flat = torch.zeros(
            numel + len(self.parameters), dtype=wire or first.dtype, device=first.device
        )
        self.body, self.marks = self.flat[:numel], self.flat[numel:]
        self._places = self._views(self.flat)
        # Gradients must have their parameter's type: another wire type needs a second home.
        same = self.flat.dtype == first.dtype
        self._home = self.flat if same else torch.zeros_like(self.flat, dtype=first.dtype)
        self._grads = self._places if same else self._views(self._home)
        self._missing: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Size of the message."""
        return self.flat.nbytes

    @torch.no_grad()
    def pack(self, weight: float = 1.0) -> None:
        """Take this rank's gradients from the parameters, which have none until `unpack`.

        ``weight`` times each of them is laid side by side; absent ones count as zero.
        """
        grads = [_dense(p.grad) for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self._missing = [i for i, grad in enumerate(grads) if grad is None]
        self.marks.fill_(1)
        for i in self._missing:
            self._places[i].zero_()
            self.marks[i] = 0
        here = [(place, g) for place, g in zip(self._places, grads, strict=True) if g is not None]
        moved = [(place, g) for place, g in here if g.data_ptr() != place.data_ptr()]
        if moved:
            places, sources = zip(*moved, strict=True)
            torch._foreach_copy_(list(places), list(sources))
        if weight != 1.0 and here:
            torch._foreach_mul_([place for place, _ in here], weight)

    @torch.no_grad()
    def unpack(self, divisor: float = 1.0) -> None:
        """Make the sums, over ``divisor``, the gradients; nobody's parameter keeps None."""
        # Read the marks only where one could be zero everywhere: on a GPU this waits for the sum.
        # A sparse wire may owe a gradient of an earlier step to a parameter that nobody used now.
        nobody = {
            i for i in self._missing if not bool(self.marks[i] > 0) and not self._places[i].any()
        }
        if self._home is not self.flat:
            self._home.copy_(self.flat)
        if divisor != 1.0:
            self._home.div_(divisor)
        for i, (parameter, grad) in enumerate(zip(self.parameters, self._grads, strict=True)):
            parameter.grad = None if i in nobody else grad

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat[: sum(self._sizes)].split(self._sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]


def _dense(grad: Tensor | None) -> Tensor | None:
    """Sparse gradients (of embeddings) travel as dense ones: ranks touch different rows."""
    return grad.to_dense() if grad is not None and grad.layout is not torch.strided else grad
