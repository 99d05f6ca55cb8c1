"""Memory of one unit on one rank: whole parameters, this rank's chunks and gradient blocks.

Whole parameters are views of one flat tensor. Resharding empties its storage; the views that
autograd has saved become valid again once the storage is filled again. A resharded parameter has
no elements, so that code which uses it too early raises an error instead of reading other memory.

While a unit is unsharded, this rank's chunks lie inside the flat tensor if the types are equal.
Otherwise, and while it is resharded, the chunks lie in the master tensor.
"""

import ctypes
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stretto.comm.shard_layout import BlockLayout, UnitLayout
from stretto.planner.plan import Sharding, Unit


class MemoryTracker:
    """Counts the bytes that the sharded strategy keeps, by kind, and their peak in each slot.

    Every allocation and release calls `add`, from any thread.
    """

    def __init__(self, num_slots: int) -> None:
        self._lock = threading.Lock()
        self._bytes_by_kind: Counter[str] = Counter()
        self._total = 0
        self._slot = 0
        self.peaks = [0] * num_slots
        """Most bytes kept in each slot of the cycle, since `reset_peaks`."""

    @property
    def total(self) -> int:
        """Bytes kept now."""
        return self._total

    def bytes_by_kind(self) -> dict[str, int]:
        """Return the bytes kept now, by kind."""
        with self._lock:
            return {kind: num_bytes for kind, num_bytes in self._bytes_by_kind.items() if num_bytes}

    def add(self, kind: str, num_bytes: int) -> None:
        """Add ``num_bytes`` of ``kind``; a negative number means a release."""
        with self._lock:
            self._bytes_by_kind[kind] += num_bytes
            self._total += num_bytes
            self.peaks[self._slot] = max(self.peaks[self._slot], self._total)

    def enter_slot(self, slot: int) -> None:
        """Count peaks for ``slot`` from now on."""
        with self._lock:
            self._slot = slot
            self.peaks[slot] = max(self.peaks[slot], self._total)

    def reset_peaks(self) -> None:
        """Forget all peaks."""
        with self._lock:
            self.peaks = [0] * len(self.peaks)
            self.peaks[self._slot] = self._total


_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 8 << 20
"""Larger tensors get pages of their own from the system. Mapping the pages anew for each tensor
costs little beside the computation with so many elements."""


def return_freed_memory() -> None:
    """Make glibc return freed memory to the system, now and from now on; needs glibc.

    By default glibc serves tensors of up to 32 MB from a heap that only shrinks at its end. A rank
    that held the whole model for a moment, or frees gradients in another order than it allocated
    them, would keep the holes.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        library.malloc_trim(0)


class UnitDtypes(NamedTuple):
    """The types that a unit's elements are stored and sent as."""

    compute: torch.dtype
    """Of whole parameters, as they are gathered and used."""
    wire: torch.dtype
    """Of gradients while they are reduced."""
    master: torch.dtype
    """Of the parameters that the optimizer updates, and of their gradients."""


class ParameterSlice(NamedTuple):
    """A contiguous slice of one parameter, in one chunk; the optimizer updates such slices."""

    parameter: nn.Parameter
    """A parameter object that views the slice."""
    tensor: int
    """Index of the whole parameter in the unit."""
    start: int
    """First element of the slice in the whole parameter."""
    block: int
    owner: int
    """Rank that owns the chunk."""
    chunk_offset: int
    """First element of the slice in its chunk."""
    stop: int
    """End of the slice in its chunk."""
    flag_index: int
    """Index of its has-gradient flag behind the chunk."""


class ShardedUnit:
    """One unit's tensors on one of the ranks that share the unit."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: UnitLayout,
        planned: Unit,
        rank: int,
        dtypes: UnitDtypes,
        memory_tracker: MemoryTracker,
    ) -> None:
        self.parameters = tuple(parameters)
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.layout, self.rank, self.dtypes = layout, rank, dtypes
        self.sharding, self.in_host = planned.sharding, planned.in_host
        self._memory_tracker = memory_tracker
        device = self.parameters[0].device
        self.flat = torch.zeros(layout.numel, dtype=dtypes.compute, device=device)
        self._views = _views(self.flat, layout, self.parameters)
        self._empty = torch.empty(0, dtype=dtypes.compute, device=device)
        with torch.no_grad():
            torch._foreach_copy_(self._views, [p.detach() for p in self.parameters])
        self.is_unsharded = True
        """Whether the flat tensor of whole parameters is allocated."""
        self._freed_gradients: set[int] = set()
        self.master = self._make_master()
        self._can_live_in_full = self.sharding.shards_parameters and dtypes.master == dtypes.compute
        self._lives_in_full = False
        self._copied_blocks: set[int] = set()
        self._move_lock = threading.Lock()
        self.param_slices = tuple(self._make_slices())
        self._slices_by_chunk: dict[tuple[int, int], list[ParameterSlice]] = {}
        for param_slice in self.param_slices:
            self._slices_by_chunk.setdefault((param_slice.block, param_slice.owner), []).append(
                param_slice
            )
        self.gradients = [
            torch.empty(block.gradient_numel, dtype=dtypes.wire, device=device)
            for block in layout.blocks
        ]
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view
        self._track_persistent()

    def free_gradients(self) -> None:
        """Free the gradient blocks, once all views of them are made; zero1 keeps them."""
        if self.sharding is not Sharding.ZERO1:
            for index, gradient in enumerate(self.gradients):
                _resize_storage(gradient, 0)
                self._freed_gradients.add(index)

    @property
    def owners(self) -> range:
        """Owners of the chunks that this rank updates: itself, or all ranks without sharding."""
        rank = self.rank
        return range(rank, rank + 1) if self.sharding.shards_optimizer else range(self.layout.ranks)

    def _track_persistent(self) -> None:
        num_bytes = self.master.nbytes if self.sharding.shards_parameters else self.flat.nbytes
        if not self.sharding.shards_parameters and self.dtypes.master != self.dtypes.compute:
            num_bytes += self.master.nbytes
        self._memory_tracker.add("parameters", num_bytes)
        if self.sharding.shards_parameters:
            self._memory_tracker.add("gathered parameters", self.flat.nbytes)
        if self.sharding is Sharding.ZERO1:
            self._memory_tracker.add("gradients", sum(g.nbytes for g in self.gradients))

    def _make_master(self) -> Tensor:
        """Return the tensor that the optimizer updates: the flat tensor if that is never freed."""
        same = self.dtypes.master == self.dtypes.compute
        if not self.sharding.shards_parameters and same:
            return self.flat
        chunks = [self.chunk(self.flat, b, owner) for owner, b in self._owned_blocks()]
        return (
            torch.cat(chunks).to(self.dtypes.master)
            if chunks
            else self._empty.to(self.dtypes.master)
        )

    def _owned_blocks(self) -> Iterator[tuple[int, BlockLayout]]:
        return ((owner, block) for block in self.layout.blocks for owner in self.owners)

    def full_block(self, index: int) -> Tensor:
        """Return block ``index`` of the whole parameters; the unit must be unsharded."""
        block = self.layout.blocks[index]
        return self.flat[block.offset : block.offset + block.numel]

    def chunk(self, flat: Tensor, block: BlockLayout, owner: int) -> Tensor:
        """Return the chunk of ``owner`` in the unit's ``flat`` tensor."""
        return flat[block.chunk_start(owner) : block.chunk_start(owner) + block.chunk]

    def master_chunk(self, index: int, owner: int) -> Tensor:
        """Return the chunk of ``owner`` of block ``index`` in the master tensor."""
        block = self.layout.blocks[index]
        if self.master is self.flat:
            return self.chunk(self.flat, block, owner)
        num_owned_chunks = len(self.owners)
        before = sum(b.chunk for b in self.layout.blocks[:index]) * num_owned_chunks
        start = before + (owner - self.owners.start) * block.chunk
        return self.master[start : start + block.chunk]

    def _make_slices(self) -> Iterator[ParameterSlice]:
        for index, block in enumerate(self.layout.blocks):
            for owner in self.owners:
                chunk = self.master_chunk(index, owner)
                for s in block.owned(owner):
                    parameter = nn.Parameter(chunk[s.chunk_offset : s.chunk_offset + s.length])
                    stop = s.chunk_offset + s.length
                    yield ParameterSlice(
                        parameter,
                        s.tensor,
                        s.start,
                        index,
                        owner,
                        s.chunk_offset,
                        stop,
                        s.flag_index,
                    )

    def slices_in_chunk(self, block: int, owner: int) -> list[ParameterSlice]:
        """Return the parameter slices that lie in one chunk."""
        return self._slices_by_chunk.get((block, owner), [])

    def allocate_full(self) -> None:
        """Allocate the flat tensor of whole parameters; its contents are undefined."""
        if self.is_unsharded:
            return
        _resize_storage(self.flat, self.layout.numel)
        self._copied_blocks.clear()
        self._memory_tracker.add("gathered parameters", self.flat.nbytes)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view
        self.is_unsharded = True

    def relocated_parameter(self) -> int | None:
        """Return the index of a parameter that no longer views the flat tensor, or None."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if parameter.data_ptr() != view.data_ptr():
                return index
        return None

    def reshard(self) -> None:
        """Free the whole parameters; this rank's chunks stay."""
        if not self.is_unsharded or not self.sharding.shards_parameters:
            return
        self.split_from_full()
        self._memory_tracker.add("gathered parameters", -self.flat.nbytes)
        for parameter in self.parameters:
            parameter.data = self._empty
        _resize_storage(self.flat, 0)
        self.is_unsharded = False

    @torch.no_grad()
    def copy_chunks_to_full(self, index: int) -> None:
        """Copy this rank's chunks of block ``index`` from the master to the flat tensor."""
        if self.master is self.flat or self._lives_in_full:
            return
        block = self.layout.blocks[index]
        for owner in self.owners:
            self.chunk(self.flat, block, owner).copy_(self.master_chunk(index, owner))
        self._copied_blocks.add(index)

    @property
    def has_copied_all_chunks(self) -> bool:
        """Whether this rank's chunks of all blocks are in the flat tensor."""
        return len(self._copied_blocks) == len(self.layout.blocks)

    def merge_into_full(self) -> None:
        """Free the master tensor while the flat tensor holds the same chunks in the same type."""
        with self._move_lock:
            if (
                self._can_live_in_full
                and self.has_copied_all_chunks
                and self.is_unsharded
                and not self._lives_in_full
            ):
                self._lives_in_full = True
                self._memory_tracker.add("parameters", -self.master.nbytes)
                _resize_storage(self.master, 0)

    def split_from_full(self) -> None:
        """Undo `merge_into_full`, before chunks are updated or whole parameters freed."""
        with self._move_lock:
            if self._lives_in_full:
                _resize_storage(self.master, self.master.numel())
                self._memory_tracker.add("parameters", self.master.nbytes)
                self._copy_all_chunks()
                self._copied_blocks.clear()
                self._lives_in_full = False

    @torch.no_grad()
    def copy_full_to_master(self) -> None:
        """Copy this rank's chunks from the whole parameters, which the user may have changed."""
        if self.master is not self.flat and not self._lives_in_full:
            self._copy_all_chunks()

    @torch.no_grad()
    def _copy_all_chunks(self) -> None:
        for index, block in enumerate(self.layout.blocks):
            for owner in self.owners:
                self.master_chunk(index, owner).copy_(self.chunk(self.flat, block, owner))

    def allocate_gradients(self) -> None:
        """Allocate all gradient blocks that are freed."""
        for index in self._freed_gradients:
            gradient = self.gradients[index]
            _resize_storage(gradient, gradient.numel())
            self._memory_tracker.add("gradients", gradient.nbytes)
        self._freed_gradients.clear()

    def free_block_gradients(self, index: int) -> None:
        """Free the gradients of block ``index``; zero1 keeps them."""
        if self.sharding is not Sharding.ZERO1 and index not in self._freed_gradients:
            self._memory_tracker.add("gradients", -self.gradients[index].nbytes)
            _resize_storage(self.gradients[index], 0)
            self._freed_gradients.add(index)


def _views(flat: Tensor, layout: UnitLayout, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [
        flat[offset : offset + p.numel()].view(p.shape)
        for offset, p in zip(layout.offsets, parameters, strict=True)
    ]


def _resize_storage(tensor: Tensor, numel: int) -> None:
    tensor.untyped_storage().resize_(numel * tensor.element_size())
