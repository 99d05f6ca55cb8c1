"""What is kept of an image: the square at its centre, or all of it.

A row of the cache holds one image in one of these forms, and every augmentation starts from it:
whether a sample was cached or decoded just now, what the model sees has the same bits.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.data.images.decoder import EXTENT

U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Form:
    """Either ``side`` by ``side`` pixels, or a whole image of at most as many."""

    side: int
    is_whole: bool = False
    """The whole image in its own proportions, shrunk where it has more pixels, never enlarged;
    its width and height stand before it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row of bytes that holds any image of this form."""
        pixels = (self.side, self.side, 3)
        return (EXTENT.size + 3 * self.side**2,) if self.is_whole else pixels


def put(row: U8, content: bytes) -> None:
    """Write ``content``, as a decoder sent it, into ``row``; what is left over becomes 0."""
    flat = row.reshape(-1)
    flat[: len(content)] = np.frombuffer(content, np.uint8)
    flat[len(content) :] = 0


def extents(rows: U8) -> NDArray[np.int64]:
    """Return width and height of the whole images in ``rows``, [B, 2]."""
    return np.ascontiguousarray(rows[:, : EXTENT.size]).view("<u4").astype(np.int64)
