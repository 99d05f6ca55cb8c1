"""The layout of a sharded unit: where its tensors lie and which rank owns which part.

This is arithmetic only; no memory is allocated here. A unit's tensors lie one behind the other in a
flat tensor, each at a multiple of `ALIGN`. The flat tensor is cut into blocks, which are separate
messages; a block may hold several tensors or a part of one. Rank r of n owns the r-th of n equal
chunks of every block.

Gradients have the same layout, with the *has-gradient flags* of a chunk behind its elements: one
for each tensor that has a part in the chunk. A rank sets the flag to 1 if it has a gradient of the
tensor, so the sum over ranks says whether any rank had one::

    unit        | tensor 0     | tensor 1                   | tensor 2 |pad|
    blocks      |          block 0           |           block 1           |
    chunks      |   0    |    1    |    2    |   0     |   1     |   2     |
    a block's gradients   |   0    |flags|    1    |flags|    2    |flags|
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stretto.errors import ScheduleError

ALIGN = 16
"""Alignment in elements. Every tensor then begins at a multiple of 32 bytes, whatever its type, and
a chunk can be sent in 2, 4, 8 or 16 equal parts."""


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """A part of one tensor that lies in one chunk of one block."""

    tensor: int
    """Index of the tensor in the unit."""
    owner: int
    """The rank that owns the chunk."""
    start: int
    """First element of the slice, counted in the tensor."""
    chunk_offset: int
    """First element of the slice, counted in the chunk."""
    length: int
    flag_index: int
    """Index of the tensor's has-gradient flag among the chunk's flags."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One block of a unit: ``ranks`` chunks of ``chunk`` elements."""

    ranks: int
    offset: int
    """First element of the block in the unit's flat tensor."""
    chunk: int
    num_flags: int
    """Flags behind each chunk of gradients; equal for all chunks, so some may be unused."""
    slices: tuple[ShardSlice, ...]

    @property
    def numel(self) -> int:
        """Elements of the block, padding included."""
        return self.ranks * self.chunk

    @property
    def gradient_numel(self) -> int:
        """Elements of the block's gradients with their flags."""
        return self.ranks * (self.chunk + self.num_flags)

    def owned(self, rank: int) -> Iterator[ShardSlice]:
        """Yield the slices in the chunk of ``rank``."""
        return (shard_slice for shard_slice in self.slices if shard_slice.owner == rank)

    def chunk_start(self, rank: int) -> int:
        """Return the first element of the chunk of ``rank`` in the unit's flat tensor."""
        return self.offset + rank * self.chunk

    def gradient_start(self, rank: int) -> int:
        """Return the first element of the chunk of ``rank`` in the block's flat gradients."""
        return rank * (self.chunk + self.num_flags)


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The layout of one unit on ``ranks`` ranks."""

    ranks: int
    offsets: tuple[int, ...]
    """First element of each tensor in the flat tensor."""
    blocks: tuple[BlockLayout, ...]

    @property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        return sum(block.numel for block in self.blocks)

    @property
    def shard_numel(self) -> int:
        """Elements that one rank owns, padding included."""
        return self.numel // self.ranks

    def owned_numel(self, rank: int) -> int:
        """Return how many elements ``rank`` owns, without padding."""
        return sum(s.length for block in self.blocks for s in block.owned(rank))


def make_unit_layout(
    numels: Sequence[int], block_lengths: Sequence[int], ranks: int, alignment: int = ALIGN
) -> UnitLayout:
    """Return the layout of a unit on ``ranks`` ranks.

    Block ends are moved up so that all chunks of a block have one length. Blocks that become empty
    by that are kept, so that a plan's blocks match the layout's at any number of ranks.

    Args:
        numels: Elements of each tensor of the unit.
        block_lengths: Wanted elements of each block.
        ranks: Number of ranks that share the unit.
        alignment: Chunks are multiples of it, with their flags and without; it divides `ALIGN`.

    Raises:
        ScheduleError: There are no tensors, an empty tensor, or no ranks.
    """
    if not numels or min(numels) < 1 or ranks < 1:
        raise ScheduleError(f"cannot lay out tensors of {list(numels)} elements on {ranks} ranks")
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += _round_up(numel, ALIGN)
    step = ranks * alignment
    bounds, filled = [0], 0
    for size in block_lengths:
        filled += size
        bounds.append(min(_round_up(filled, step), _round_up(end, step)))
    bounds[-1] = _round_up(end, step)
    spans = [(start, start + numel) for start, numel in zip(offsets, numels, strict=True)]
    blocks = [
        _make_block_layout(start, stop, spans, ranks, alignment) for start, stop in pairwise(bounds)
    ]
    return UnitLayout(ranks, tuple(offsets), tuple(blocks))


def _make_block_layout(
    start: int, stop: int, spans: Sequence[tuple[int, int]], ranks: int, alignment: int
) -> BlockLayout:
    chunk = (stop - start) // ranks
    slices: list[ShardSlice] = []
    max_slices = 0
    for owner in range(ranks):
        first = start + owner * chunk
        last = first + chunk
        in_chunk = [
            (tensor, max(begin, first), min(end, last))
            for tensor, (begin, end) in enumerate(spans)
            if max(begin, first) < min(end, last)
        ]
        max_slices = max(max_slices, len(in_chunk))
        slices += [
            ShardSlice(tensor, owner, low - spans[tensor][0], low - first, high - low, flag_index)
            for flag_index, (tensor, low, high) in enumerate(in_chunk)
        ]
    return BlockLayout(ranks, start, chunk, _round_up(max_slices, alignment), tuple(slices))


def _round_up(number: int, alignment: int) -> int:
    return -(-number // alignment) * alignment
