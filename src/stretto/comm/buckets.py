"""Gradient buckets: several gradients that are sent as one message.

Every message costs latency, so small tensors share one. A bucket is sent as soon as backward has
produced its last gradient, so buckets follow the order of backward.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Bucket:
    """The gradients of a few parameters in one flat tensor, in the type in which they are sent.

    Behind the gradients lies one *has-gradient flag* per parameter: 1 if this rank has a gradient,
    else 0. The sum of the flags over ranks says whether any rank had one. A parameter that no rank
    used keeps ``grad = None``, as it would on one rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], wire_dtype: torch.dtype | None) -> None:
        self.parameters = tuple(parameters)
        self._sizes = [p.numel() for p in parameters]
        first = self.parameters[0]
        numel = sum(self._sizes)
        self.flat = torch.zeros(
            numel + len(self.parameters), dtype=wire_dtype or first.dtype, device=first.device
        )
        self.gradients, self.gradient_flags = self.flat[:numel], self.flat[numel:]
        self._wire_views = self._views(self.flat)
        # Gradients must have their parameter's type: another wire type needs a second tensor.
        is_same_dtype = self.flat.dtype == first.dtype
        self._gradient_storage = (
            self.flat if is_same_dtype else torch.zeros_like(self.flat, dtype=first.dtype)
        )
        self._gradient_views = (
            self._wire_views if is_same_dtype else self._views(self._gradient_storage)
        )
        self._missing_gradients: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Size of the message in bytes."""
        return self.flat.nbytes

    @torch.no_grad()
    def pack(self, weight: float = 1.0) -> None:
        """Move this rank's gradients, times ``weight``, into the flat tensor.

        A missing gradient counts as zero. Until `unpack`, the parameters have no gradients.
        """
        grads = [_to_dense(p.grad) for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self._missing_gradients = [i for i, grad in enumerate(grads) if grad is None]
        self.gradient_flags.fill_(1)
        for i in self._missing_gradients:
            self._wire_views[i].zero_()
            self.gradient_flags[i] = 0
        present = [
            (view, g) for view, g in zip(self._wire_views, grads, strict=True) if g is not None
        ]
        to_copy = [(view, g) for view, g in present if g.data_ptr() != view.data_ptr()]
        if to_copy:
            views, sources = zip(*to_copy, strict=True)
            torch._foreach_copy_(list(views), list(sources))
        if weight != 1.0 and present:
            torch._foreach_mul_([view for view, _ in present], weight)

    @torch.no_grad()
    def unpack(self, divisor: float = 1.0) -> None:
        """Give the parameters the sums, divided by ``divisor``, as views of the flat tensor.

        A parameter that no rank used gets None.
        """
        # Flags are read only where this rank had no gradient: on a GPU the read waits for the sum.
        # A sparse wire may send an old gradient to a parameter that no rank used in this step.
        unused = {
            i
            for i in self._missing_gradients
            if not bool(self.gradient_flags[i] > 0) and not self._wire_views[i].any()
        }
        if self._gradient_storage is not self.flat:
            self._gradient_storage.copy_(self.flat)
        if divisor != 1.0:
            self._gradient_storage.div_(divisor)
        for i, (parameter, grad) in enumerate(
            zip(self.parameters, self._gradient_views, strict=True)
        ):
            parameter.grad = None if i in unused else grad

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat[: sum(self._sizes)].split(self._sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]


def _to_dense(grad: Tensor | None) -> Tensor | None:
    """Return a sparse gradient (of an embedding) as a dense one: ranks touch different rows."""
    return grad.to_dense() if grad is not None and grad.layout is not torch.strided else grad
