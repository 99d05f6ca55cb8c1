"""Eight bits an element: a sign, four of exponent, three of fraction, and a scale for each block.

The error of one rounding, A being the largest magnitude of the block, is at most the largest of
|x| / 17 (worst halfway between 1 and 1 1/8), A / 2^17 (half the smallest step, which matters where
|x| < A / 2^13) and 2^-127 (which matters where all of the block is below 2^-109).
`stretto.comm.codecs.bound` says what becomes of it over many hops. Infinities and NaN stay
non-finite (which of them, and its sign, is not promised), and may take the digits of the other
values of their block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.errors import ScheduleError

PER_HOP_ERROR = 1 / 17
"""Largest error of one rounding, relative to the largest magnitude of the block."""
TILE, LARGE_TILE = 1 << 17, 1 << 22
"""Elements worked on at once: on a CPU few, which stay in its cache; else many, in few launches."""

# Note: which scale. A block's scale is the smallest power of two s with A / s <= 464, the largest
# number that rounds to 448, the largest there is. So A / s is above 232 and rounds to 240 or more:
# the largest magnitude of what is decoded leads to the same s, and encoding it again gives the
# same bytes. In bits: with e the biased exponent of A, s = 2^(e - 135), or twice that where the
# fraction of A is above 13/16; adding 3/16 less one unit to the bits carries in just these cases.
_CARRY = (3 << 19) - 1
_FRACTION_BITS = 23
_LEAST, _MOST = 18, 255
"""Bounds of the exponent that travels: below, the steps would be subnormal in fp32."""
_INFINITY_BITS = 0x7F800000


@dataclass(frozen=True, slots=True)
class Fp8:
    """`float8_e4m3fn` with one power of two for each ``block`` elements of a chunk."""

    block: int = 256

    @property
    def name(self) -> str:
        """What must be equal on all ranks, in words."""
        return f"fp8 in blocks of {self.block}"

    def check(self, tensor: Tensor) -> None:
        """Raise `ScheduleError` if ``tensor`` cannot be encoded."""
        if tensor.dtype is not torch.float32:
            raise ScheduleError(f"fp8 encodes float32, not {tensor.dtype}: cast the tensor first")

    def num_bytes(self, chunks: Sequence[int]) -> int:
        """Return what chunks of these lengths take: a byte an element and a byte a block."""
        return sum(length + -(-length // self.block) for length in chunks)

    def num_working(self, chunks: Sequence[int], device: torch.device) -> int:
        """Return how many elements `lay` needs to work in on ``device``."""
        return 3 * min(sum(chunks), max(_tile_size(device), self.block))

    def lay(self, place: Tensor, chunks: Sequence[int], wire: Tensor, work: Tensor) -> "_Laid":
        """Pair ``place`` with ``wire``, tile by tile: bytes first, then exponents."""
        tiles: list[_Tile] = []
        at = 0
        for values in _tiles(place, chunks, self.block):
            count, blocks, _ = values.shape
            middle, end = at + values.numel(), at + values.numel() + count * blocks
            exponents = wire[middle:end].view(count, blocks, 1)
            tiles.append(_tile(values, wire[at:middle], exponents, work))
            at = end
        return _Laid(tuple(tiles))


def _tiles(place: Tensor, chunks: Sequence[int], block: int) -> Iterator[Tensor]:
    """Yield views [chunk, block, element] that together are ``place``.

    Neighbouring chunks of one length share their views, so their number hardly matters.
    """
    at = 0
    for length, group in groupby(chunks):
        count = len(list(group))
        rows = place[at : at + count * length].view(count, length)
        at += count * length
        whole = length // block * block
        if whole:
            yield from _split(rows[:, :whole].unflatten(1, (-1, block)))
        if whole < length:
            yield from _split(rows[:, whole:].unsqueeze(1))


def _split(values: Tensor) -> Iterator[Tensor]:
    size = _tile_size(values.device)
    _, blocks, width = values.shape
    for some in values.split(max(1, size // (blocks * width))):
        yield from some.split(max(1, size // (some.shape[0] * width)), dim=1)


def _tile_size(device: torch.device) -> int:
    return TILE if device.type == "cpu" else LARGE_TILE


class _Laid(NamedTuple):
    """One message's stretch of the tensor, as tiles."""

    tiles: "tuple[_Tile, ...]"

    def encode(self) -> None:
        for tile in self.tiles:
            tile.encode()

    def decode(self) -> None:
        for tile in self.tiles:
            tile.decode()


@dataclass(frozen=True, slots=True)
class _Tile:
    """As many blocks as are worked on at once; ``scale`` and ``bits`` are one memory."""

    values: Tensor
    payload: Tensor
    exponents: Tensor
    work: Tensor
    index: Tensor
    scale: Tensor
    bits: Tensor
    table: Tensor

    def encode(self) -> None:
        torch.abs(self.values, out=self.work)
        torch.amax(self.work, dim=-1, keepdim=True, out=self.scale)
        exponent = self.bits.clamp_(max=_INFINITY_BITS).add_(_CARRY)
        exponent.bitwise_right_shift_(_FRACTION_BITS).clamp_(_LEAST, _MOST)
        self.exponents.copy_(exponent)
        exponent.neg_().add_(262).bitwise_left_shift_(_FRACTION_BITS)  # scale is now 1 / s
        torch.mul(self.values, self.scale, out=self.work)
        self.payload.view(torch.float8_e4m3fn).copy_(self.work.view(-1))
        self.decode()

    def decode(self) -> None:
        # Looked up: six times as fast as the framework's cast on a CPU.
        self.index.copy_(self.payload)
        torch.index_select(self.table, 0, self.index, out=self.work.view(-1))
        self.bits.copy_(self.exponents).sub_(8).bitwise_left_shift_(_FRACTION_BITS)
        # Where the exponent is largest 448 is what infinity became; here it is infinity again.
        torch.mul(self.work, self.scale, out=self.values)


def _tile(values: Tensor, payload: Tensor, exponents: Tensor, work: Tensor) -> _Tile:
    n = values.numel()
    scale = work[2 * n : 2 * n + exponents.numel()].view(exponents.shape)
    return _Tile(
        values,
        payload,
        exponents,
        work[:n].view(values.shape),
        work[n : 2 * n].view(torch.int32),
        scale,
        scale.view(torch.int32),
        _table(values.device),
    )


@lru_cache
def _table(device: torch.device) -> Tensor:
    """Return the value of each byte."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)
