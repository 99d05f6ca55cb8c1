"""The memory of one unit: whole parameters, this rank's chunks, gradients on their way.

Whole parameters are views of one flat tensor. To let them go its storage is emptied; views that
backward has saved see the new one once it is there again. A parameter that is not there has no
elements, so that whoever uses it out of turn is told, and reads no foreign memory.

While whole parameters are there, this rank's chunks of the same type lie inside them, and nowhere
else.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stretto.comm.shards import BlockLayout, UnitLayout
from stretto.plan.value import Sharding, Unit
from stretto.strategy.sharded.ledger import Ledger


class Types(NamedTuple):
    """What a unit's elements are kept and travel as."""

    compute: torch.dtype
    """Whole parameters, as they are gathered and used."""
    wire: torch.dtype
    """Gradients on their way."""
    kept: torch.dtype
    """What is updated, and gradients then."""


class Piece(NamedTuple):
    """What the optimizer updates: a stretch of one of the unit's parameters."""

    parameter: nn.Parameter
    tensor: int
    """Which of the unit's parameters."""
    start: int
    """First element of that one."""
    block: int
    owner: int
    place: int
    """Where it begins in its chunk."""
    stop: int
    """Where it ends there."""
    mark: int


class UnitStorage:
    """One unit's tensors on one rank of those that share it."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: UnitLayout,
        planned: Unit,
        rank: int,
        types: Types,
        ledger: Ledger,
    ) -> None:
        self.parameters = tuple(parameters)
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.layout, self.rank, self.types = layout, rank, types
        self.sharding, self.in_host = planned.sharding, planned.in_host
        self._ledger = ledger
        device = self.parameters[0].device
        self.flat = torch.zeros(layout.numel, dtype=types.compute, device=device)
        self._views = _views(self.flat, layout, self.parameters)
        self._empty = torch.empty(0, dtype=types.compute, device=device)
        with torch.no_grad():
            torch._foreach_copy_(self._views, [p.detach() for p in self.parameters])
        self.live = True
        """Whether whole parameters are there."""
        self._without_room: set[int] = set()
        self.kept = self._keep()
        self._may_lie_inside = self.sharding.is_freed and types.kept == types.compute
        self._lies_inside = False
        self._laid: set[int] = set()
        self._moving = threading.Lock()
        self.pieces = tuple(self._cut_pieces())
        self._pieces_in: dict[tuple[int, int], list[Piece]] = {}
        for piece in self.pieces:
            self._pieces_in.setdefault((piece.block, piece.owner), []).append(piece)
        self.gradients = [
            torch.empty(block.gradient_numel, dtype=types.wire, device=device)
            for block in layout.blocks
        ]
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view
        self._charge_always()

    def empty_gradients(self) -> None:
        """Give the room for gradients back, once everybody has cut the views that they need."""
        if self.sharding is not Sharding.ZERO1:
            for index, gradient in enumerate(self.gradients):
                _resize(gradient, 0)
                self._without_room.add(index)

    @property
    def owners(self) -> range:
        """The chunks that this rank updates: its own, or all."""
        mine = self.rank
        return range(mine, mine + 1) if self.sharding.is_split else range(self.layout.ranks)

    def _charge_always(self) -> None:
        num_bytes = self.kept.nbytes if self.sharding.is_freed else self.flat.nbytes
        if not self.sharding.is_freed and self.types.kept != self.types.compute:
            num_bytes += self.kept.nbytes
        self._ledger.take("parameters", num_bytes)
        if self.sharding.is_freed:
            self._ledger.take("gathered parameters", self.flat.nbytes)
        if self.sharding is Sharding.ZERO1:
            self._ledger.take("gradients", sum(g.nbytes for g in self.gradients))

    def _keep(self) -> Tensor:
        """Return where pieces lie: in the flat tensor where it stays, else in one of their own."""
        same = self.types.kept == self.types.compute
        if not self.sharding.is_freed and same:
            return self.flat
        chunks = [self.chunk(self.flat, b, owner) for owner, b in self._owned_blocks()]
        return torch.cat(chunks).to(self.types.kept) if chunks else self._empty.to(self.types.kept)

    def _owned_blocks(self) -> Iterator[tuple[int, BlockLayout]]:
        return ((owner, block) for block in self.layout.blocks for owner in self.owners)

    def whole(self, index: int) -> Tensor:
        """Return block ``index`` of the whole parameters, which must be there."""
        block = self.layout.blocks[index]
        return self.flat[block.offset : block.offset + block.numel]

    def chunk(self, flat: Tensor, block: BlockLayout, owner: int) -> Tensor:
        """Return the chunk of ``owner`` in the unit's ``flat`` tensor."""
        return flat[block.chunk_start(owner) : block.chunk_start(owner) + block.chunk]

    def kept_chunk(self, index: int, owner: int) -> Tensor:
        """Return the chunk of ``owner`` of block ``index`` as it is kept."""
        block = self.layout.blocks[index]
        if self.kept is self.flat:
            return self.chunk(self.flat, block, owner)
        share = len(self.owners)
        before = sum(b.chunk for b in self.layout.blocks[:index]) * share
        start = before + (owner - self.owners.start) * block.chunk
        return self.kept[start : start + block.chunk]

    def _cut_pieces(self) -> Iterator[Piece]:
        for index, block in enumerate(self.layout.blocks):
            for owner in self.owners:
                chunk = self.kept_chunk(index, owner)
                for s in block.owned(owner):
                    parameter = nn.Parameter(chunk[s.place : s.place + s.length])
                    stop = s.place + s.length
                    yield Piece(parameter, s.tensor, s.start, index, owner, s.place, stop, s.mark)

    def pieces_in(self, block: int, owner: int) -> list[Piece]:
        """Return the pieces that lie in one chunk."""
        return self._pieces_in.get((block, owner), [])

    def allocate(self) -> None:
        """Make room for whole parameters."""
        if self.live:
            return
        _resize(self.flat, self.layout.numel)
        self._laid.clear()
        self._ledger.take("gathered parameters", self.flat.nbytes)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view
        self.live = True

    def moved(self) -> int | None:
        """Return a parameter that somebody has given other memory, if there is one."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if parameter.data_ptr() != view.data_ptr():
                return index
        return None

    def let_go(self) -> None:
        """Let whole parameters go; this rank's chunks stay."""
        if not self.live or not self.sharding.is_freed:
            return
        self.keep_apart()
        self._ledger.take("gathered parameters", -self.flat.nbytes)
        for parameter in self.parameters:
            parameter.data = self._empty
        _resize(self.flat, 0)
        self.live = False

    @torch.no_grad()
    def lay_chunks(self, index: int) -> None:
        """Put what this rank has updated of block ``index`` where it is gathered from and used."""
        if self.kept is self.flat or self._lies_inside:
            return
        block = self.layout.blocks[index]
        for owner in self.owners:
            self.chunk(self.flat, block, owner).copy_(self.kept_chunk(index, owner))
        self._laid.add(index)

    @property
    def is_laid(self) -> bool:
        """Whether this rank's chunks of all blocks have been laid."""
        return len(self._laid) == len(self.layout.blocks)

    def keep_inside(self) -> None:
        """Let this rank's chunks lie in the whole parameters alone, once all have been laid."""
        with self._moving:
            if self._may_lie_inside and self.is_laid and self.live and not self._lies_inside:
                self._lies_inside = True
                self._ledger.take("parameters", -self.kept.nbytes)
                _resize(self.kept, 0)

    def keep_apart(self) -> None:
        """Let this rank's chunks lie apart: they are updated, or the whole parameters go."""
        with self._moving:
            if self._lies_inside:
                _resize(self.kept, self.kept.numel())
                self._ledger.take("parameters", self.kept.nbytes)
                self._copy_own()
                self._laid.clear()
                self._lies_inside = False

    @torch.no_grad()
    def take_whole(self) -> None:
        """Keep what whole parameters now are: somebody else has set them."""
        if self.kept is not self.flat and not self._lies_inside:
            self._copy_own()

    @torch.no_grad()
    def _copy_own(self) -> None:
        for index, block in enumerate(self.layout.blocks):
            for owner in self.owners:
                self.kept_chunk(index, owner).copy_(self.chunk(self.flat, block, owner))

    def room_for_gradients(self) -> None:
        """Make room for the gradients of one backward."""
        for index in self._without_room:
            gradient = self.gradients[index]
            _resize(gradient, gradient.numel())
            self._ledger.take("gradients", gradient.nbytes)
        self._without_room.clear()

    def drop_gradients(self, index: int) -> None:
        """Let the gradients of block ``index`` go."""
        if self.sharding is not Sharding.ZERO1 and index not in self._without_room:
            self._ledger.take("gradients", -self.gradients[index].nbytes)
            _resize(self.gradients[index], 0)
            self._without_room.add(index)


def _views(flat: Tensor, layout: UnitLayout, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [
        flat[offset : offset + p.numel()].view(p.shape)
        for offset, p in zip(layout.offsets, parameters, strict=True)
    ]


def _resize(tensor: Tensor, numel: int) -> None:
    tensor.untyped_storage().resize_(numel * tensor.element_size())
