"""Wire formats that send less than a gradient's own type, and the FP8 codec.

`parse_wire` reads a wire format from a run file. There are three ways to send less:

- a *cast* (bf16, fp16): the bucket is stored, summed and sent in `WireFormat.dtype`;
- *per hop* (`Fp8`): messages are encoded before every send and decoded after it, sums are fp32.
  Give `WireFormat.codec` to `CollectiveExecutor.prepare`;
- *sparse* (`stretto.comm.topk_all_reduce.TopKAllReduce`): the largest entries of every rank are
  gathered and summed, and the rest is kept for the next step.

Flags and other counts must not be in a tensor that a codec encodes: beside a flag of 1, gradients
of 1e-6 would be rounded to 0. Encode only the gradients of a bucket, and send the flags plainly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stretto.collectives.schedule import Action, Round
from stretto.config.formatting import suggest_known_name
from stretto.errors import ConfigError, ScheduleError


class BoundCodec(Protocol):
    """A codec bound to a slice of a tensor and its wire buffer; calls allocate nothing."""

    def encode(self) -> None:
        """Write the slice to the wire buffer, and overwrite the slice with its decoded value."""
        ...

    def decode(self) -> None:
        """Overwrite the slice with the value of the wire buffer."""
        ...


class Codec(Protocol):
    """Encodes slices of a tensor as bytes, chunk by chunk.

    The encoding of a chunk depends on that chunk alone, not on the message it is part of.

    The sender rounds its own copy too: `BoundCodec.encode` overwrites the slice with the value that
    the receiver will decode. So both ends hold the same bits, and in an exchange both add the same
    two numbers. To encode a decoded value must give the same bytes again: a relay then forwards
    exactly what it received, and two lanes may send one slice at the same time. A sum that is never
    sent (see `unsent_sums`) is rounded on the rank that made it.
    """

    @property
    def name(self) -> str:
        """The codec and its settings as text; must be equal on all ranks."""
        ...

    def check(self, tensor: Tensor) -> None:
        """Raise `ScheduleError` if ``tensor`` cannot be encoded."""
        ...

    def num_bytes(self, chunks: Sequence[int]) -> int:
        """Return the encoded size in bytes of chunks of these lengths."""
        ...

    def workspace_numel(self, chunks: Sequence[int], device: torch.device) -> int:
        """Return the workspace of `bind` on ``device``, in elements of the tensor's type."""
        ...

    def bind(
        self, values: Tensor, chunks: Sequence[int], wire: Tensor, workspace: Tensor
    ) -> BoundCodec:
        """Bind ``values``, which consist of chunks of these lengths, to the buffer ``wire``.

        ``workspace`` is used only during calls, so that several bound codecs may share it.
        """
        ...


def unsent_sums(rounds: Sequence[Round], num_chunks: int) -> list[list[tuple[int, int]]]:
    """Return for each round the chunk ranges it adds to that are neither sent nor copied later.

    The other ranks receive rounded copies of the same sums, so these must be rounded too.
    """
    last = np.full(num_chunks, -1)
    for index, round_ in enumerate(rounds):
        # A round sends before it adds, so its own sends do not count for its sums.
        for op in sorted(round_.ops, key=lambda op: op.action is Action.ADD):
            last[op.start : op.stop] = index if op.action is Action.ADD else -1
    ranges: list[list[tuple[int, int]]] = [[] for _ in rounds]
    edges = [0, *(np.flatnonzero(np.diff(last)) + 1).tolist(), num_chunks]
    for start, stop in pairwise(edges):
        if last[start] >= 0:
            ranges[int(last[start])].append((start, stop))
    return ranges


PER_HOP_ERROR = 1 / 17
"""Largest error of one rounding, relative to the largest magnitude of the block."""
TILE, LARGE_TILE = 1 << 17, 1 << 22
"""Elements processed at once: few on a CPU, for its cache; many on a GPU, for few launches."""

# How the scale is chosen. A is the largest magnitude of a block. The scale is the smallest power of
# two s with A / s <= 464, the largest number that rounds to 448, the largest FP8 value. So A / s is
# above 232 and rounds to at least 240. The decoded block therefore has the same s, and encoding it
# again gives the same bytes. In bits: with e the biased exponent of A, s = 2^(e - 135), or twice
# that if the fraction of A is above 13/16. Adding 3/16 less one unit carries in just these cases.
_CARRY = (3 << 19) - 1
_FRACTION_BITS = 23
_MIN_EXPONENT, _MAX_EXPONENT = 18, 255
"""Bounds of the exponent that is sent; below them, the steps would be subnormal in fp32."""
_INFINITY_BITS = 0x7F800000


@dataclass(frozen=True, slots=True)
class Fp8:
    """Eight bits for each element (`float8_e4m3fn`), and a power-of-two scale for each block.

    The error of one rounding of x is at most the largest of three numbers, with A the largest
    magnitude of the block: |x| / 17 (worst halfway between 1 and 1 1/8); A / 2^17 (half the
    smallest step; it matters if |x| < A / 2^13); 2^-127 (it matters if A < 2^-109). For many hops
    see `stretto.collectives.codec_error_bound`.

    Infinities and NaN stay non-finite, but one may become the other and the sign may change. The
    other values of their block may lose their digits.
    """

    block: int = 256
    """Elements with a common scale."""

    @property
    def name(self) -> str:
        """The codec and its settings as text; must be equal on all ranks."""
        return f"fp8 in blocks of {self.block}"

    def check(self, tensor: Tensor) -> None:
        """Raise `ScheduleError` if ``tensor`` cannot be encoded."""
        if tensor.dtype is not torch.float32:
            raise ScheduleError(f"fp8 encodes float32, not {tensor.dtype}: cast the tensor first")

    def num_bytes(self, chunks: Sequence[int]) -> int:
        """Return the encoded size of the chunks: one byte an element and one byte a block."""
        return sum(length + -(-length // self.block) for length in chunks)

    def workspace_numel(self, chunks: Sequence[int], device: torch.device) -> int:
        """Return the elements of workspace that `bind` needs on ``device``."""
        return 3 * min(sum(chunks), max(_tile_size(device), self.block))

    def bind(
        self, tensor: Tensor, chunks: Sequence[int], wire: Tensor, workspace: Tensor
    ) -> "_BoundFp8":
        """Bind ``tensor`` to ``wire``, tile by tile; a tile's bytes come first, then exponents."""
        tiles: list[_Tile] = []
        offset = 0
        for values in _cut_into_tiles(tensor, chunks, self.block):
            count, blocks, _ = values.shape
            middle, end = offset + values.numel(), offset + values.numel() + count * blocks
            exponents = wire[middle:end].view(count, blocks, 1)
            tiles.append(_make_tile(values, wire[offset:middle], exponents, workspace))
            offset = end
        return _BoundFp8(tuple(tiles))


def _cut_into_tiles(tensor: Tensor, chunks: Sequence[int], block: int) -> Iterator[Tensor]:
    """Yield views [chunk, block, element] that together cover ``tensor``.

    Consecutive chunks of one length share views, so that many chunks cost little more than few.
    """
    offset = 0
    for length, group in groupby(chunks):
        count = len(list(group))
        rows = tensor[offset : offset + count * length].view(count, length)
        offset += count * length
        whole = length // block * block
        if whole:
            yield from _split_to_tile_size(rows[:, :whole].unflatten(1, (-1, block)))
        if whole < length:
            yield from _split_to_tile_size(rows[:, whole:].unsqueeze(1))


def _split_to_tile_size(values: Tensor) -> Iterator[Tensor]:
    size = _tile_size(values.device)
    _, blocks, width = values.shape
    for part in values.split(max(1, size // (blocks * width))):
        yield from part.split(max(1, size // (part.shape[0] * width)), dim=1)


def _tile_size(device: torch.device) -> int:
    return TILE if device.type == "cpu" else LARGE_TILE


class _BoundFp8(NamedTuple):
    """The slice of the tensor of one message, as tiles."""

    tiles: "tuple[_Tile, ...]"

    def encode(self) -> None:
        for tile in self.tiles:
            tile.encode()

    def decode(self) -> None:
        for tile in self.tiles:
            tile.decode()


@dataclass(frozen=True, slots=True)
class _Tile:
    """The blocks that are processed at once; ``scale`` and ``bits`` share their memory."""

    values: Tensor
    payload: Tensor
    exponents: Tensor
    workspace: Tensor
    index: Tensor
    scale: Tensor
    bits: Tensor
    table: Tensor

    def encode(self) -> None:
        torch.abs(self.values, out=self.workspace)
        torch.amax(self.workspace, dim=-1, keepdim=True, out=self.scale)
        exponent = self.bits.clamp_(max=_INFINITY_BITS).add_(_CARRY)
        exponent.bitwise_right_shift_(_FRACTION_BITS).clamp_(_MIN_EXPONENT, _MAX_EXPONENT)
        self.exponents.copy_(exponent)
        exponent.neg_().add_(262).bitwise_left_shift_(_FRACTION_BITS)  # scale is now 1 / s
        torch.mul(self.values, self.scale, out=self.workspace)
        self.payload.view(torch.float8_e4m3fn).copy_(self.workspace.view(-1))
        self.decode()

    def decode(self) -> None:
        # A table lookup is six times as fast as PyTorch's cast on a CPU.
        self.index.copy_(self.payload)
        torch.index_select(self.table, 0, self.index, out=self.workspace.view(-1))
        self.bits.copy_(self.exponents).sub_(8).bitwise_left_shift_(_FRACTION_BITS)
        # The largest exponent means an infinite scale: it restores the infinity that became 448.
        torch.mul(self.workspace, self.scale, out=self.values)


def _make_tile(values: Tensor, payload: Tensor, exponents: Tensor, workspace: Tensor) -> _Tile:
    n = values.numel()
    scale = workspace[2 * n : 2 * n + exponents.numel()].view(exponents.shape)
    return _Tile(
        values,
        payload,
        exponents,
        workspace[:n].view(values.shape),
        workspace[n : 2 * n].view(torch.int32),
        scale,
        scale.view(torch.int32),
        _decode_table(values.device),
    )


@lru_cache
def _decode_table(device: torch.device) -> Tensor:
    """Return the fp32 value of each FP8 byte."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


WIRE_DTYPES: dict[str, torch.dtype | None] = {
    "own": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""The type in which gradients are sent, by name; "own" is the gradient's own type."""


def check_wire_dtype(name: str) -> str:
    """Return ``name`` if it is the name of a wire type.

    Raises:
        ValueError: It is not.
    """
    if name not in WIRE_DTYPES:
        raise ValueError(f"expected {', '.join(WIRE_DTYPES)}, got {name!r}")
    return name


@dataclass(frozen=True, slots=True)
class WireFormat:
    """How gradients are sent; at most one of ``codec`` and ``kept_fraction`` is set."""

    text: str
    """The format as written in a run file."""
    dtype: torch.dtype | None
    """The type of a bucket's flat tensor; None is the gradients' own type."""
    codec: Codec | None = None
    """Encodes every message, for `CollectiveExecutor.prepare`; not for the algorithm "native"."""
    kept_fraction: Fraction | None = None
    """The fraction of entries that each rank sends, for `TopKAllReduce`."""


def parse_wire(text: str) -> WireFormat:
    """Read a wire format: a name of `WIRE_DTYPES`, ``"fp8"``, or for example ``"topk 1%"``.

    Raises:
        ConfigError: There is no such format; the message suggests the nearest one.
    """
    name, _, rest = text.strip().partition(" ")
    if name == "topk":
        return WireFormat(
            text.strip(), torch.float32, kept_fraction=_parse_kept_fraction(text, rest.strip())
        )
    formats = (*WIRE_DTYPES, "fp8", "topk 1%")
    if rest or name not in formats:
        raise ConfigError(f"no wire {text!r}{suggest_known_name(text, formats, 'known')}")
    return (
        WireFormat(name, torch.float32, Fp8())
        if name == "fp8"
        else WireFormat(name, WIRE_DTYPES[name])
    )


def _parse_kept_fraction(text: str, percent: str) -> Fraction:
    try:
        kept_fraction = Fraction(percent.removesuffix("%").strip()) / 100
    except (ValueError, ZeroDivisionError):
        kept_fraction = Fraction(0)
    if not percent.endswith("%") or not 0 < kept_fraction <= 1:
        raise ConfigError(
            f'wire {text!r}: write the share of entries to send as "topk 1%", above 0% and at '
            "most 100%"
        )
    return kept_fraction


__all__ = ["BoundCodec", "Codec", "Fp8", "WireFormat", "parse_wire"]
