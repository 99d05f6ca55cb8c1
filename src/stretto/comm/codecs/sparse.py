"""Sums of the largest entries only; what a rank did not send, it adds to its next gradient.

Nothing is lost: with x the gradient plus what was left, every entry of x is either sent or left, as
it is. What is left is small: its squared norm is at most 1 - k/n of that of x, for k of n entries
(Stich, Cordonnier and Jaggi, 2018, arXiv:1809.07599). Every rank adds all ranks' entries in the
order of ranks, so all end with the same bits.
"""

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from stretto.comm.channel import Pending
from stretto.comm.codecs.topk import largest, num_kept, ranking
from stretto.comm.courier import Courier
from stretto.comm.schedule import Schedule
from stretto.errors import CheckpointError, ScheduleError


class SparseSum:
    """Sums one fp32 tensor over ranks, sending ``share`` of its entries; made once, used each step.

    ``gather`` is an all-gather (`ring_all_gather`): a rank sends and receives n-1 times 8 bytes for
    each entry kept. It holds a residual and two keys, 20 bytes in all, for each element. With one
    rank nothing travels, yet the share is kept and the rest delayed all the same.
    """

    def __init__(
        self, courier: Courier, gather: Schedule, rank: int, tensor: Tensor, share: Fraction
    ) -> None:
        if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
            raise ScheduleError(
                f"the largest entries are taken from contiguous float32, not {tensor.dtype}: "
                "cast or copy the tensor first"
            )
        self._courier = courier
        self._flat = tensor.detach().view(-1)
        self._num = num_kept(self._flat.numel(), share)
        self._left = torch.zeros_like(self._flat)
        self._order = ranking(self._flat.numel(), self._flat.device)
        self._keys = torch.empty_like(self._order)
        # Rows whose length the gather's chunks divide: else they would not be owned whole.
        parts = gather.num_chunks // gather.size
        row = -(-2 * self._num // parts) * parts
        entries = torch.zeros(gather.size, row, dtype=torch.int32, device=self._flat.device)
        self._indices = entries[:, : self._num]
        self._values = entries[:, self._num : 2 * self._num].view(torch.float32)
        self._rank = rank
        self._errand = courier.prepare(gather, entries)
        courier.agree(self._errand)

    @torch.no_grad()
    def start(self) -> "SparsePending":
        """Send the largest entries; the tensor is the sum once the result has been waited for.

        All ranks together, one at a time: wait before the next start.
        """
        self._left.add_(self._flat)
        chosen = largest(self._left, self._num, self._order, self._keys)
        self._indices[self._rank].copy_(chosen)
        self._values[self._rank].copy_(self._left[chosen])
        self._left[chosen] = 0
        return SparsePending(self, self._courier.start(self._errand))

    def state_dict(self) -> dict[str, Tensor]:
        """Return what is left to be sent; it is this rank's own."""
        return {"residual": self._left.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what was left."""
        residual = state["residual"]
        if residual.shape != self._left.shape:
            raise CheckpointError(
                f"the residual has {residual.numel()} elements, the gradients have "
                f"{self._left.numel()}: it was saved with other buckets or another model"
            )
        self._left.copy_(residual)

    @torch.no_grad()
    def add_up(self) -> None:
        """Overwrite the tensor by the sum of what has been gathered, in the order of ranks."""
        self._flat.zero_()
        for indices, values in zip(self._indices, self._values, strict=True):
            self._flat.index_add_(0, indices, values)


class SparsePending:
    """Entries on their way; `wait` leaves the sum in the tensor."""

    def __init__(self, whose: SparseSum, gathered: Pending) -> None:
        self._whose: SparseSum | None = whose
        self._gathered = gathered

    def wait(self) -> None:
        """Return when the tensor is the sum; may be called again."""
        self._gathered.wait()
        if self._whose is not None:
            self._whose.add_up()
            self._whose = None

    @property
    def finished_s(self) -> float | None:
        """Monotonic time at which the last entry had arrived; None before."""
        return self._gathered.finished_s
