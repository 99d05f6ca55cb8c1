"""From stored squares of pixels to what the model sees: cut, mirrored, normalised.

What happens to a sample is a pure function of (seed, epoch, index): it does not depend on the
batch, the rank or the order in which samples are asked for.
"""

import numpy as np
from numpy.typing import NDArray

from stretto.data.hashing import GOLDEN, counters, derive_key, mix64, uniforms
from stretto.data.images.config import ImagesConfig

U8 = NDArray[np.uint8]
_SALT = 0x696D616765
"""Keeps these draws apart from those of the order of samples, which has a seed and epoch, too."""


class Augment:
    """The way of a batch from bytes [B, side, side, 3] to floats [B, 3, size, size]."""

    def __init__(self, config: ImagesConfig, *, train: bool) -> None:
        self._size = config.size
        self._seed = config.seed
        self._mirrors = train and config.augment != "none"
        self._moves = train and config.augment in ("crop", "pad_crop")
        self._pad = config.size // 8 if train and config.augment == "pad_crop" else 0
        # (pixel / 255 - mean) / std, as one product and one sum.
        mean, std = np.array(config.mean), np.array(config.std)
        self._scale = (1 / (255 * std)).astype(np.float32)[:, None, None]
        self._shift = (-mean / std).astype(np.float32)[:, None, None]

    def __call__(self, pixels: U8, indices: NDArray[np.int64], epoch: int) -> NDArray[np.float32]:
        """Return the samples ``indices``, whose stored squares are ``pixels``, as of ``epoch``."""
        keys = mix64(derive_key(self._seed, epoch, _SALT) + GOLDEN * indices.astype(np.uint64))
        draws = uniforms(mix64(keys[:, None] + counters(0, 3)))
        if not self._moves:
            draws[:, :2] = 0.5  # the centre
        slack = pixels.shape[1] + 2 * self._pad - self._size
        corners = (draws[:, :2] * (slack + 1)).astype(np.int64)
        mirrored = (draws[:, 2] < 0.5) & self._mirrors
        images = np.empty((len(pixels), 3, self._size, self._size), dtype=np.float32)
        for image, square, (top, left), mirror in zip(
            images, pixels, corners, mirrored, strict=True
        ):
            image[...] = self._cut(square, top, left, mirror).transpose(2, 0, 1)
        images *= self._scale
        images += self._shift
        return images

    def _cut(self, square: U8, top: int, left: int, mirror: bool) -> U8:
        if self._pad:
            rows = _reflected(top - self._pad, self._size, len(square))
            columns = _reflected(left - self._pad, self._size, len(square))
            cut: U8 = square[rows[:, None], columns]
        else:
            cut = square[top : top + self._size, left : left + self._size]
        return cut[:, ::-1] if mirror else cut


def _reflected(start: int, count: int, length: int) -> NDArray[np.int64]:
    """Return ``count`` places from ``start`` on, those outside [0, length) mirrored at the edge."""
    places = np.abs(np.arange(start, start + count))
    mirrored: NDArray[np.int64] = length - 1 - np.abs(length - 1 - places)
    return mirrored
