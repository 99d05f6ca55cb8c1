"""Top-k sparse all-reduce with error feedback: only the largest entries of a gradient are sent.

A rank keeps the entries that it did not send in a residual and adds them to its next gradient.
Nothing is lost: with x the gradient plus the residual, every entry of x is either sent or kept
unchanged. The new residual is small: for k of n entries, its squared norm is at most 1 - k/n of
that of x (Stich, Cordonnier and Jaggi, 2018, arXiv:1809.07599). Every rank adds the entries of all
ranks in rank order, so all end with the same bits.
"""

import math
from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from stretto.collectives.schedule import Schedule
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.transport import Work
from stretto.errors import CheckpointError, ScheduleError

_MAGNITUDE_MASK = 0x7FFFFFFF
_LOW_32_BITS = (1 << 32) - 1


def num_kept(numel: int, kept_fraction: Fraction) -> int:
    """Return the number of entries to keep of ``numel``: ``kept_fraction`` of them, rounded up."""
    return math.ceil(numel * kept_fraction)


def tie_break_keys(numel: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the int64 numbers ``numel - 1`` down to 0: of equal values the first then wins."""
    return torch.arange(numel - 1, -1, -1, dtype=torch.int64, device=device)


def largest_indices(values: Tensor, num: int, tie_break: Tensor, keys: Tensor) -> Tensor:
    """Return the indices of the ``num`` largest magnitudes, ascending; of equals, the first.

    NaN counts as larger than infinity. A key has the bits of the magnitude above and the tie break
    below, so no two keys are equal. The result is therefore the same for every sorting algorithm.

    Args:
        values: A flat fp32 tensor.
        num: Number of indices to return.
        tie_break: The `tie_break_keys` of as many elements.
        keys: Workspace, int64, as long as ``values``.
    """
    keys.copy_(values.view(torch.int32)).bitwise_and_(_MAGNITUDE_MASK)
    keys.bitwise_left_shift_(32).bitwise_or_(tie_break)
    if not num:
        chosen = keys[:0]
    elif keys.is_cpu:  # NumPy's partition is eight times as fast as topk on a CPU
        array = keys.numpy()
        array.partition(len(array) - num)
        chosen = keys[len(array) - num :]
    else:
        chosen = keys.topk(num, sorted=False).values
    return (values.numel() - 1 - (chosen & _LOW_32_BITS)).sort().values


class TopKAllReduce:
    """Sums one fp32 tensor over ranks by its largest entries; created once, used in every step.

    A rank sends and receives 8 bytes for each kept entry of each of the n-1 other ranks. The
    residual and the keys take 20 bytes for each element. With one rank nothing is sent, but the
    smaller entries are delayed all the same.

    Args:
        executor: Runs the all-gather.
        all_gather: An all-gather schedule, such as `ring_all_gather`.
        rank: This rank.
        tensor: The contiguous fp32 tensor to sum in place.
        kept_fraction: The fraction of its entries that each rank sends.
    """

    def __init__(
        self,
        executor: CollectiveExecutor,
        all_gather: Schedule,
        rank: int,
        tensor: Tensor,
        kept_fraction: Fraction,
    ) -> None:
        if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
            raise ScheduleError(
                f"the largest entries are taken from contiguous float32, not {tensor.dtype}: "
                "cast or copy the tensor first"
            )
        self._executor = executor
        self._flat = tensor.detach().view(-1)
        self._num_kept = num_kept(self._flat.numel(), kept_fraction)
        self._residual = torch.zeros_like(self._flat)
        self._tie_break_keys = tie_break_keys(self._flat.numel(), self._flat.device)
        self._keys = torch.empty_like(self._tie_break_keys)
        # Padded so that a row consists of whole chunks of the all-gather, all owned by one rank.
        parts = all_gather.num_chunks // all_gather.size
        row = -(-2 * self._num_kept // parts) * parts
        entries = torch.zeros(all_gather.size, row, dtype=torch.int32, device=self._flat.device)
        self._indices = entries[:, : self._num_kept]
        self._values = entries[:, self._num_kept : 2 * self._num_kept].view(torch.float32)
        self._rank = rank
        self._bound = executor.prepare(all_gather, entries)
        executor.check_same_on_all_ranks(self._bound)

    @torch.no_grad()
    def start(self) -> "TopKWork":
        """Send the largest entries; after `TopKWork.wait` the tensor is the sum.

        All ranks call this together. The work must be waited for before the next start.
        """
        self._residual.add_(self._flat)
        chosen = largest_indices(self._residual, self._num_kept, self._tie_break_keys, self._keys)
        self._indices[self._rank].copy_(chosen)
        self._values[self._rank].copy_(self._residual[chosen])
        self._residual[chosen] = 0
        return TopKWork(self, self._executor.start(self._bound))

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's residual: the entries that it has not sent yet."""
        return {"residual": self._residual.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the residual.

        Raises:
            CheckpointError: It has another number of elements than the tensor.
        """
        residual = state["residual"]
        if residual.shape != self._residual.shape:
            raise CheckpointError(
                f"the residual has {residual.numel()} elements, the gradients have "
                f"{self._residual.numel()}: it was saved with other buckets or another model"
            )
        self._residual.copy_(residual)

    @torch.no_grad()
    def sum_gathered_entries(self) -> None:
        """Overwrite the tensor with the sum of the gathered entries, added in rank order."""
        self._flat.zero_()
        for indices, values in zip(self._indices, self._values, strict=True):
            self._flat.index_add_(0, indices, values)


class TopKWork:
    """A running sparse sum; `wait` leaves the sum in the tensor."""

    def __init__(self, all_reduce: TopKAllReduce, gathered: Work) -> None:
        self._all_reduce: TopKAllReduce | None = all_reduce
        self._gathered = gathered

    def wait(self) -> None:
        """Return when the tensor holds the sum; may be called again."""
        self._gathered.wait()
        if self._all_reduce is not None:
            self._all_reduce.sum_gathered_entries()
            self._all_reduce = None

    @property
    def finished_s(self) -> float | None:
        """Monotonic time at which the last entry arrived; None before that."""
        return self._gathered.finished_s
