"""Crops of random area and aspect, the usual ones for ImageNet: from the whole image to a square.

The crop is cut from the image as it is kept (`stretto.data.images.form`), whole and in its own
proportions. An image with more than store x store pixels was shrunk before, and a small crop of it
is less sharp than one of the file would be. On 500 x 375 images with the spectrum of photographs,
crops to 224 pixels differ from those of the file by 34 dB (store = 384, 442 kB an image), 31 dB
(320, 307 kB) and 28 dB (256, 197 kB); nothing is lost from store = 448 (602 kB) on. Squeezing the
image to a square instead would cost 0.1 to 1 dB more, and lose something of smaller images, too.
"""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from stretto.data.images.config import ImagesConfig
from stretto.data.images.decoder import EXTENT
from stretto.data.images.form import U8, extents

F64 = NDArray[np.float64]
Range = tuple[float, float]
TRIES = 10
"""Rectangles that are drawn before the centre is taken; all but odd images fit the first few."""
_PLAIN_AREA, _PLAIN_ASPECT = (0.999, 1.0), (1.0, 1.0)
_BITS = 24
"""Of the draw that becomes an aspect: steps of a ten-millionth of the range."""


class AreaCrop:
    """Cuts rectangles out of whole images; another one in each epoch."""

    num_draws = 2 + 2 * TRIES

    def __init__(self, config: ImagesConfig) -> None:
        self._size = config.size
        self._usual = (config.area, config.aspect)
        self._plain_from = config.plain_from_epoch

    def places(self, rows: U8, draws: F64, epoch: int) -> F64:
        """Return the rectangle to cut out of each row, [B, 4]."""
        is_plain = self._plain_from is not None and epoch >= self._plain_from
        area, aspect = (_PLAIN_AREA, _PLAIN_ASPECT) if is_plain else self._usual
        return draw_boxes(draws, extents(rows), area, aspect)

    def cut(self, row: U8, place: F64) -> U8:
        """Return the rectangle at ``place``, scaled to size by size; averages where it shrinks."""
        from PIL import Image

        width, height = (int(length) for length in extents(row[None])[0])
        pixels = row[EXTENT.size : EXTENT.size + 3 * width * height]
        whole = Image.frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)
        box = cast("tuple[float, float, float, float]", tuple(place.tolist()))
        return np.asarray(whole.resize((self._size,) * 2, Image.Resampling.BILINEAR, box=box))


def draw_boxes(draws: F64, sizes: NDArray[np.int64], area: Range, aspect: Range) -> F64:
    """Return left, top, right and bottom of a rectangle in each image, in fractions of pixels.

    The first of `TRIES` rectangles that fits is taken: its share of the image's area is uniform in
    ``area``, the logarithm of width over height uniform in ``aspect``. Where none fits it is the
    largest at the centre whose aspect is allowed.

    Args:
        draws: [B, 2 + 2 * TRIES] in [0, 1): where, and then area and aspect of each try.
        sizes: [B, 2], width and height of each image.
        area: Least and greatest share of the image.
        aspect: Least and greatest width over height.
    """
    lengths = sizes.astype(np.float64)
    width, height = lengths.T
    shares, bends = draws[:, 2::2], draws[:, 3::2]
    pixels = (area[0] + (area[1] - area[0]) * shares) * (width * height)[:, None]
    aspects = aspect[0] * _power(aspect[1] / aspect[0], bends)
    tries = np.stack([np.sqrt(pixels * aspects), np.sqrt(pixels / aspects)], axis=-1)
    fits = np.logical_and(*np.moveaxis(tries <= lengths[:, None], -1, 0))
    shape = np.clip(width / height, *aspect)
    centred = np.minimum(lengths, np.stack([height * shape, width / shape], axis=-1))
    is_drawn = np.any(fits, axis=1, keepdims=True)
    extent = np.where(is_drawn, tries[np.arange(len(tries)), fits.argmax(axis=1)], centred)
    start = np.where(is_drawn, draws[:, :2], 0.5) * (lengths - extent)
    return np.concatenate([start, np.minimum(start + extent, lengths)], axis=1)


def _power(base: float, exponents: F64) -> F64:
    """Return ``base`` to each exponent in [0, 1), by square roots and products alone.

    IEEE 754 rounds these exactly, and exp and log not: a sample must not depend on the machine.
    """
    result = np.ones_like(exponents)
    for _ in range(_BITS):
        base = float(np.sqrt(base))
        exponents = exponents * 2
        is_set = exponents >= 1
        result = np.where(is_set, result * base, result)
        exponents = exponents - is_set
    return result
