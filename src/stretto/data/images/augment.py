"""Augmentation: crop, mirror and normalise stored pixels into the model's inputs.

The result for a sample is a pure function of (seed, epoch, index). It does not depend on the batch,
the rank or the order in which samples are requested.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from stretto.data.hashing import GOLDEN, counters, derive_key, mix64, uniforms
from stretto.data.images.config import U8, ImagesConfig, image_sizes
from stretto.data.images.decoder import EXTENT

F64 = NDArray[np.float64]
Range = tuple[float, float]
MAX_TRIES = 10
"""Rectangles to try before the centre crop is taken; most images fit one of the first few."""
_PLAIN_AREA, _PLAIN_ASPECT = (0.999, 1.0), (1.0, 1.0)
_BITS = 24
"""Bits of the draw that becomes an aspect ratio: enough for steps of 1e-7 of the range."""


class AreaCrop:
    """Cuts a rectangle of random area and aspect out of the whole image, as is usual for ImageNet.

    The rectangle is cut from the stored image (see `Form`). A stored image was shrunk if the file
    had more than store x store pixels, so a small crop of it is less sharp than a crop of the file.
    Measured on 500 x 375 images with the spectrum of photographs, for crops scaled to 224 pixels:

    | store | bytes per image | difference from crops of the file |
    |---|---|---|
    | 256 | 197 kB | 28 dB |
    | 320 | 307 kB | 31 dB |
    | 384 | 442 kB | 34 dB |
    | 448 | 602 kB | none |

    Storing the image squeezed to a square instead would cost another 0.1 to 1 dB, and would also
    lose detail of smaller images.
    """

    num_draws = 2 + 2 * MAX_TRIES

    def __init__(self, config: ImagesConfig) -> None:
        self._size = config.size
        self._area_and_aspect = (config.area, config.aspect)
        self._plain_from_epoch = config.plain_from_epoch

    def positions(self, rows: U8, draws: F64, epoch: int) -> F64:
        """Return the rectangle to cut out of each row, [B, 4], drawn anew for each epoch."""
        is_plain = self._plain_from_epoch is not None and epoch >= self._plain_from_epoch
        area, aspect = (_PLAIN_AREA, _PLAIN_ASPECT) if is_plain else self._area_and_aspect
        return draw_boxes(draws, image_sizes(rows), area, aspect)

    def crop(self, row: U8, position: F64) -> U8:
        """Return the rectangle at ``position``, resized to size x size with antialiasing."""
        from PIL import Image

        width, height = (int(length) for length in image_sizes(row[None])[0])
        pixels = row[EXTENT.size : EXTENT.size + 3 * width * height]
        whole_image = Image.frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)
        box = cast("tuple[float, float, float, float]", tuple(position.tolist()))
        return np.asarray(whole_image.resize((self._size,) * 2, Image.Resampling.BILINEAR, box=box))


def draw_boxes(draws: F64, sizes: NDArray[np.int64], area: Range, aspect: Range) -> F64:
    """Return left, top, right and bottom of a rectangle in each image, in fractional pixels.

    Up to `MAX_TRIES` rectangles are drawn and the first that fits is taken. The fraction of the
    image's area is uniform in ``area``, and the logarithm of width over height is uniform in
    ``aspect``. If none fits, the result is the largest rectangle at the centre with an allowed
    aspect.

    Args:
        draws: [B, 2 + 2 * MAX_TRIES] in [0, 1): the position, then area and aspect of each try.
        sizes: [B, 2], width and height of each image.
        area: Smallest and largest fraction of the image's area.
        aspect: Smallest and largest width over height.
    """
    lengths = sizes.astype(np.float64)
    width, height = lengths.T
    area_draws, aspect_draws = draws[:, 2::2], draws[:, 3::2]
    pixels = (area[0] + (area[1] - area[0]) * area_draws) * (width * height)[:, None]
    aspects = aspect[0] * exact_power(aspect[1] / aspect[0], aspect_draws)
    tries = np.stack([np.sqrt(pixels * aspects), np.sqrt(pixels / aspects)], axis=-1)
    fits = np.logical_and(*np.moveaxis(tries <= lengths[:, None], -1, 0))
    shape = np.clip(width / height, *aspect)
    centred = np.minimum(lengths, np.stack([height * shape, width / shape], axis=-1))
    is_drawn = np.any(fits, axis=1, keepdims=True)
    extent = np.where(is_drawn, tries[np.arange(len(tries)), fits.argmax(axis=1)], centred)
    start = np.where(is_drawn, draws[:, :2], 0.5) * (lengths - extent)
    return np.concatenate([start, np.minimum(start + extent, lengths)], axis=1)


def exact_power(base: float, exponents: F64) -> F64:
    """Return ``base`` to each exponent in [0, 1), computed from square roots and products alone.

    IEEE 754 rounds these exactly, but not exp and log. A sample must have the same bits on every
    machine.
    """
    result = np.ones_like(exponents)
    for _ in range(_BITS):
        base = float(np.sqrt(base))
        exponents = exponents * 2
        is_set = exponents >= 1
        result = np.where(is_set, result * base, result)
        exponents = exponents - is_set
    return result


MapFunction = Callable[..., Iterable[Any]]
"""Calls a function for every item of its other arguments: `map`, or `Executor.map`."""
_SALT = 0x696D616765
"""Separates these draws from those of the sample order, which have the same coordinates."""


class Augment:
    """Turns stored rows of bytes into a batch of floats, [B, 3, size, size]."""

    def __init__(self, config: ImagesConfig, *, train: bool) -> None:
        self._size = config.size
        self._seed = config.seed
        self._mirrors = train and config.augment != "none"
        is_whole = config.form(train=train).is_whole
        self._cropper: _Cropper = AreaCrop(config) if is_whole else _WindowCrop(config, train=train)
        # (pixel / 255 - mean) / std, written as scale * pixel + shift.
        mean, std = np.array(config.mean), np.array(config.std)
        self._scale = (1 / (255 * std)).astype(np.float32)[:, None, None]
        self._shift = (-mean / std).astype(np.float32)[:, None, None]

    def __call__(
        self, rows: U8, indices: NDArray[np.int64], epoch: int, map_function: MapFunction = map
    ) -> NDArray[np.float32]:
        """Return the samples ``indices``, stored in ``rows``, augmented for ``epoch``.

        ``map_function`` may use threads, because the samples are independent of each other.
        """
        keys = mix64(derive_key(self._seed, epoch, _SALT) + GOLDEN * indices.astype(np.uint64))
        draws = uniforms(mix64(keys[:, None] + counters(0, 1 + self._cropper.num_draws)))
        # The third draw decides about mirroring for every cropper, so the crop does not affect it.
        mirrored = (draws[:, 2] < 0.5) & self._mirrors
        positions = self._cropper.positions(rows, np.delete(draws, 2, axis=1), epoch)
        images = np.empty((len(rows), 3, self._size, self._size), dtype=np.float32)
        deque(map_function(self._render, images, rows, positions, mirrored), maxlen=0)
        images *= self._scale
        images += self._shift
        return images

    def _render(
        self, image: NDArray[np.float32], row: U8, position: NDArray[Any], mirror: bool
    ) -> None:
        crop = self._cropper.crop(row, position)
        image[...] = (crop[:, ::-1] if mirror else crop).transpose(2, 0, 1)


class _Cropper(Protocol):
    """Cuts a square of size x size pixels out of a stored image."""

    @property
    def num_draws(self) -> int:
        """Number of random numbers that a sample needs."""
        ...

    def positions(self, rows: U8, draws: F64, epoch: int) -> NDArray[Any]:
        """Return the position of the crop in each row; ``draws`` is [B, num_draws]."""
        ...

    def crop(self, row: U8, position: NDArray[Any]) -> U8:
        """Return the pixels at ``position``, [size, size, 3]."""
        ...


class _WindowCrop:
    """Cuts a window of size x size pixels out of a stored square, without resizing."""

    num_draws = 2

    def __init__(self, config: ImagesConfig, *, train: bool) -> None:
        self._size = config.size
        self._is_random = train and config.augment in ("crop", "pad_crop")
        self._pad = config.size // 8 if train and config.augment == "pad_crop" else 0

    def positions(self, rows: U8, draws: F64, epoch: int) -> NDArray[np.int64]:
        slack = rows.shape[1] + 2 * self._pad - self._size
        where = draws if self._is_random else np.full_like(draws, 0.5)  # the centre
        corners: NDArray[np.int64] = (where * (slack + 1)).astype(np.int64)
        return corners

    def crop(self, row: U8, position: NDArray[np.int64]) -> U8:
        top, left = position
        if not self._pad:
            return row[top : top + self._size, left : left + self._size]
        rows = _reflect_indices(top - self._pad, self._size, len(row))
        columns = _reflect_indices(left - self._pad, self._size, len(row))
        crop: U8 = row[rows[:, None], columns]
        return crop


def _reflect_indices(start: int, count: int, length: int) -> NDArray[np.int64]:
    """Return ``count`` indices from ``start`` on, with those outside [0, length) reflected."""
    positions = np.abs(np.arange(start, start + count))
    mirrored: NDArray[np.int64] = length - 1 - np.abs(length - 1 - positions)
    return mirrored
