"""From stored pixels to what the model sees: cut, mirrored, normalised.

What happens to a sample is a pure function of (seed, epoch, index): it does not depend on the
batch, the rank or the order in which samples are asked for.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.data.hashing import GOLDEN, counters, derive_key, mix64, uniforms
from stretto.data.images.area import F64, AreaCrop
from stretto.data.images.config import ImagesConfig
from stretto.data.images.form import U8

Each = Callable[..., Iterable[Any]]
"""Calls a function for every item of its other arguments: `map`, or that of an executor."""
_SALT = 0x696D616765
"""Keeps these draws apart from those of the order of samples, which has a seed and epoch, too."""


class Augment:
    """The way of a batch from rows of stored bytes to floats [B, 3, size, size]."""

    def __init__(self, config: ImagesConfig, *, train: bool) -> None:
        self._size = config.size
        self._seed = config.seed
        self._mirrors = train and config.augment != "none"
        whole = config.form(train=train).is_whole
        self._cutter: _Cutter = AreaCrop(config) if whole else _Window(config, train=train)
        # (pixel / 255 - mean) / std, as one product and one sum.
        mean, std = np.array(config.mean), np.array(config.std)
        self._scale = (1 / (255 * std)).astype(np.float32)[:, None, None]
        self._shift = (-mean / std).astype(np.float32)[:, None, None]

    def __call__(
        self, rows: U8, indices: NDArray[np.int64], epoch: int, each: Each = map
    ) -> NDArray[np.float32]:
        """Return the samples ``indices``, stored in ``rows``, as of ``epoch``.

        ``each`` may use threads: no sample depends on another.
        """
        keys = mix64(derive_key(self._seed, epoch, _SALT) + GOLDEN * indices.astype(np.uint64))
        draws = uniforms(mix64(keys[:, None] + counters(0, 1 + self._cutter.num_draws)))
        # The third draw mirrors, whatever the cutter needs: crops may change, flips stay.
        mirrored = (draws[:, 2] < 0.5) & self._mirrors
        places = self._cutter.places(rows, np.delete(draws, 2, axis=1), epoch)
        images = np.empty((len(rows), 3, self._size, self._size), dtype=np.float32)
        deque(each(self._show, images, rows, places, mirrored), maxlen=0)
        images *= self._scale
        images += self._shift
        return images

    def _show(self, image: NDArray[np.float32], row: U8, place: NDArray[Any], mirror: bool) -> None:
        cut = self._cutter.cut(row, place)
        image[...] = (cut[:, ::-1] if mirror else cut).transpose(2, 0, 1)


class _Cutter(Protocol):
    """Takes a square of size by size out of what is stored."""

    @property
    def num_draws(self) -> int:
        """How many random numbers a sample needs."""
        ...

    def places(self, rows: U8, draws: F64, epoch: int) -> NDArray[Any]:
        """Return what to cut out of each row, by draws [B, num_draws]."""
        ...

    def cut(self, row: U8, place: NDArray[Any]) -> U8:
        """Return the pixels at ``place``, [size, size, 3]."""
        ...


class _Window:
    """Cuts squares of size pixels out of stored ones, pixel by pixel."""

    num_draws = 2

    def __init__(self, config: ImagesConfig, *, train: bool) -> None:
        self._size = config.size
        self._moves = train and config.augment in ("crop", "pad_crop")
        self._pad = config.size // 8 if train and config.augment == "pad_crop" else 0

    def places(self, rows: U8, draws: F64, epoch: int) -> NDArray[np.int64]:
        slack = rows.shape[1] + 2 * self._pad - self._size
        where = draws if self._moves else np.full_like(draws, 0.5)  # the centre
        corners: NDArray[np.int64] = (where * (slack + 1)).astype(np.int64)
        return corners

    def cut(self, row: U8, place: NDArray[np.int64]) -> U8:
        top, left = place
        if not self._pad:
            return row[top : top + self._size, left : left + self._size]
        rows = _reflected(top - self._pad, self._size, len(row))
        columns = _reflected(left - self._pad, self._size, len(row))
        cut: U8 = row[rows[:, None], columns]
        return cut


def _reflected(start: int, count: int, length: int) -> NDArray[np.int64]:
    """Return ``count`` places from ``start`` on, those outside [0, length) mirrored at the edge."""
    places = np.abs(np.arange(start, start + count))
    mirrored: NDArray[np.int64] = length - 1 - np.abs(length - 1 - places)
    return mirrored
