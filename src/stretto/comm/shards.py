"""Where the tensors of a unit lie, and which rank owns what: pure arithmetic, no memory.

A unit's tensors lie one behind the other in a flat tensor, each beginning at a multiple of `ALIGN`.
The flat tensor is cut into blocks, which travel by themselves; a block may hold several tensors or
a stretch of one. Rank r of n owns the r-th of n equal chunks of every block. Gradients travel in
the same order, with the *marks* of a chunk behind its elements: one for each tensor that has a
part in it, 1 on a rank that has a gradient of the tensor, so that the sum tells whether anybody
had one::

    unit        | tensor 0     | tensor 1                   | tensor 2 |pad|
    blocks      |          block 0           |           block 1           |
    chunks      |   0    |    1    |    2    |   0     |   1     |   2     |
    a block's gradients   |   0    |marks|    1    |marks|    2    |marks|
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stretto.errors import ScheduleError

ALIGN = 16
"""Elements: kernels like addresses that are multiples of 32 bytes, whatever the type; and chunks
that are multiples of it can be sent in 2, 4, 8 or 16 equal parts."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of one tensor that lies in one chunk of one block."""

    tensor: int
    owner: int
    """The rank whose chunk it is in."""
    start: int
    """First element of the tensor that is in it."""
    place: int
    """Where that one lies in the chunk."""
    length: int
    mark: int
    """Place of the tensor's mark among the chunk's marks."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One block of a unit: ``ranks`` chunks of ``chunk`` elements."""

    ranks: int
    offset: int
    """Where it begins in the unit's flat tensor."""
    chunk: int
    marks: int
    """Room for marks behind each chunk of gradients; as much for all, some without a meaning."""
    stretches: tuple[Stretch, ...]

    @property
    def numel(self) -> int:
        """Elements of the block, padding included."""
        return self.ranks * self.chunk

    @property
    def gradient_numel(self) -> int:
        """Elements of its gradients with their marks."""
        return self.ranks * (self.chunk + self.marks)

    def owned(self, rank: int) -> Iterator[Stretch]:
        """Yield what lies in the chunk of ``rank``."""
        return (stretch for stretch in self.stretches if stretch.owner == rank)

    def chunk_start(self, rank: int) -> int:
        """Return where the chunk of ``rank`` begins in the unit's flat tensor."""
        return self.offset + rank * self.chunk

    def gradient_start(self, rank: int) -> int:
        """Return where the chunk of ``rank`` begins in the block's flat gradients."""
        return rank * (self.chunk + self.marks)


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """Where everything of one unit lies."""

    ranks: int
    offsets: tuple[int, ...]
    """Where each tensor begins in the flat tensor."""
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
        """Return how many elements of tensors ``rank`` owns."""
        return sum(s.length for block in self.blocks for s in block.owned(rank))


def lay_unit(
    numels: Sequence[int], cuts: Sequence[int], ranks: int, grain: int = ALIGN
) -> UnitLayout:
    """Lay tensors of ``numels`` elements in blocks of about ``cuts`` elements for ``ranks``.

    A chunk, with its marks and without, is a multiple of ``grain``, which is one of `ALIGN`.
    A cut is moved to the next place where every rank gets as much; blocks that become empty by
    that are kept, empty, so that a plan's blocks are the layout's at any number of ranks.
    """
    if not numels or min(numels) < 1 or ranks < 1:
        raise ScheduleError(f"cannot lay out tensors of {list(numels)} elements on {ranks} ranks")
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += _up(numel, ALIGN)
    step = ranks * grain
    bounds, filled = [0], 0
    for size in cuts:
        filled += size
        bounds.append(min(_up(filled, step), _up(end, step)))
    bounds[-1] = _up(end, step)
    spans = [(start, start + numel) for start, numel in zip(offsets, numels, strict=True)]
    blocks = [_block(start, stop, spans, ranks, grain) for start, stop in pairwise(bounds)]
    return UnitLayout(ranks, tuple(offsets), tuple(blocks))


def _block(
    start: int, stop: int, spans: Sequence[tuple[int, int]], ranks: int, grain: int
) -> BlockLayout:
    chunk = (stop - start) // ranks
    stretches: list[Stretch] = []
    most = 0
    for owner in range(ranks):
        first = start + owner * chunk
        last = first + chunk
        inside = [
            (tensor, max(begin, first), min(end, last))
            for tensor, (begin, end) in enumerate(spans)
            if max(begin, first) < min(end, last)
        ]
        most = max(most, len(inside))
        stretches += [
            Stretch(tensor, owner, low - spans[tensor][0], low - first, high - low, mark)
            for mark, (tensor, low, high) in enumerate(inside)
        ]
    return BlockLayout(ranks, start, chunk, _up(most, grain), tuple(stretches))


def _up(number: int, grain: int) -> int:
    return -(-number // grain) * grain
