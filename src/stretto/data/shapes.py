"""Generated images of plane figures: a data set that needs no files and keeps no state.

Image ``i`` is a pure function of (seed, split, i), and its class is the figure it shows. Position,
size, rotation, colours and even the sign of the contrast are random, and a dot is added as a
distractor. A linear classifier therefore fails, while a small convolutional net succeeds.

Each figure is given by its signed distance: below zero inside, above zero outside, with the figure
inside the unit disc. Only operations that IEEE 754 rounds exactly are used (no sine, no
exponential). A pixel therefore has the same bits on every machine and in every batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from stretto.config import Config
from stretto.data.hashing import GOLDEN, U64, counters, derive_key, mix64, uniforms
from stretto.data.sample_source import StatelessSource

F32 = NDArray[np.float32]
SignedDistanceFunction = Callable[[F32, F32], F32]
"""(x, y) of each pixel, with the figure upright at the origin -> distance to its edge."""


def _disc(x: F32, y: F32) -> F32:
    return np.sqrt(x * x + y * y) - np.float32(0.85)


def _square(x: F32, y: F32) -> F32:
    return np.maximum(np.abs(x), np.abs(y)) - np.float32(0.7)


def _triangle(x: F32, y: F32) -> F32:
    slanted = np.abs(x) * np.float32(0.8660254) + y * np.float32(0.5)
    return np.maximum(slanted, -y) - np.float32(0.5)


def _cross(x: F32, y: F32) -> F32:
    x, y = np.abs(x), np.abs(y)
    long, short = np.maximum(x, y), np.minimum(x, y)
    return np.maximum(long - np.float32(0.95), short - np.float32(0.25))


def _ring(x: F32, y: F32) -> F32:
    return np.abs(np.sqrt(x * x + y * y) - np.float32(0.7)) - np.float32(0.22)


def _star(x: F32, y: F32) -> F32:
    x, y = np.abs(x), np.abs(y)
    long, short = np.maximum(x, y), np.minimum(x, y)
    # Four points; the edges have slope 1/3, hence the length of their normal, sqrt(10).
    return (long + short * np.float32(3) - np.float32(1)) * np.float32(0.31622777)


def _bars(x: F32, y: F32) -> F32:
    distance_y = np.abs(np.abs(y) - np.float32(0.5)) - np.float32(0.22)
    return np.maximum(np.abs(x) - np.float32(0.68), distance_y)


def _frame(x: F32, y: F32) -> F32:
    return np.abs(np.maximum(np.abs(x), np.abs(y)) - np.float32(0.54)) - np.float32(0.16)


FIGURES: Mapping[str, SignedDistanceFunction] = {
    "disc": _disc,
    "cross": _cross,
    "ring": _ring,
    "triangle": _triangle,
    "bars": _bars,
    "star": _star,
    "square": _square,
    "frame": _frame,
}
"""Signed distance function of each figure by name; the index of a figure is its class."""


_DISTANCES = tuple(FIGURES.values())
_BLOCK_PIXELS = 1 << 15
"""Pixels rendered at a time: small enough for the CPU cache, large enough to hide call overhead."""

_NUM_DRAWS = 18
_TAN_22_5 = 0.41421356


class ShapesConfig(Config):
    """The ``[data]`` table of a run whose ``kind`` is ``"shapes"``."""

    kind: Literal["shapes"] = "shapes"
    samples: int = Field(default=4096, ge=1)
    """Images in one training epoch."""
    test_samples: int = Field(default=1024, ge=1)
    """Images for evaluation; none of them occurs in training."""
    size: int = Field(default=32, ge=8)
    """Height and width in pixels."""
    classes: int = Field(default=8, ge=2, le=len(FIGURES))
    """Number of figures, and of classes."""
    noise: float = Field(default=0.1, ge=0)
    """Standard deviation of the noise on every pixel; contrasts are about 1."""
    seed: int = 0
    """Seed of the generator; another seed gives another data set."""


class Shapes(StatelessSource):
    """The images of one split, rendered on request."""

    def __init__(self, config: ShapesConfig, *, train: bool) -> None:
        self.num_samples = config.samples if train else config.test_samples
        self.fingerprint = f"{config.model_dump_json()} {'train' if train else 'test'}"
        self._size = config.size
        self._classes = config.classes
        self._key = derive_key(config.seed, int(train))
        # In the random stream of an image the noise follows the draws for the scene. Each hash of
        # 64 bits gives the noise of four pixels.
        num_hashes = -(-3 * config.size**2 // 4)
        self._noise_counters = counters(_NUM_DRAWS, _NUM_DRAWS + num_hashes)
        # 16 bits make one number, uniform on [-1, 1): its standard deviation is 1/sqrt(3).
        self._noise_scale = np.float32(config.noise * 3**0.5 / 2**15)

    def batch(self, indices: NDArray[np.int64], epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Return images [B, 3, size, size] in float32, roughly zero-mean, and classes [B].

        They are the same in every epoch.
        """
        keys = mix64(self._key + GOLDEN * indices.astype(np.uint64))
        draws = uniforms(mix64(keys[:, None] + counters(0, _NUM_DRAWS)))
        labels = (draws[:, 0] * self._classes).astype(np.int64)
        images = np.empty((indices.size, 3, self._size, self._size), dtype=np.float32)
        by_class = np.argsort(labels, kind="stable")
        step = max(1, _BLOCK_PIXELS // self._size**2)
        for start in range(0, indices.size, step):
            block = by_class[start : start + step]
            scene = _scene(labels[block], draws[block])
            images[block] = self._paint(scene, keys[block])
        return torch.from_numpy(images), torch.from_numpy(labels)

    def _paint(self, scene: "_Scene", keys: U64) -> F32:
        """Return the images of one block: background, dot, figure in front of the dot, noise."""
        figure, dot = _cover_figure(scene, self._size), _cover_dot(scene, self._size)
        dot *= np.float32(1) - figure
        canvas = self._noise(keys)
        canvas += scene.background[:, :, None, None]
        canvas += scene.figure_contrast[:, :, None, None] * figure[:, None]
        canvas += scene.dot_contrast[:, :, None, None] * dot[:, None]
        return canvas

    def _noise(self, keys: U64) -> F32:
        hashes = mix64(keys[:, None] + self._noise_counters).astype("<u8", copy=False)
        levels = hashes.view("<i2")[:, : 3 * self._size**2]
        noise = levels.astype(np.float32)
        noise *= self._noise_scale
        return noise.reshape(-1, 3, self._size, self._size)


@dataclass(frozen=True, slots=True, eq=False)
class _Scene:
    """What the images of a block show: one row per image, rows in order of class.

    Positions and radii are in units of half the image's side, with the origin in its middle.
    """

    labels: NDArray[np.int64]
    centre: F32
    radius: F32
    direction: F32
    background: F32
    figure_contrast: F32
    dot: F32
    dot_contrast: F32


def _scene(labels: NDArray[np.int64], draws: NDArray[np.float64]) -> _Scene:
    """Convert draws in [0, 1) to the properties of each image."""
    signed = 2 * draws - 1
    radius = 0.45 + 0.25 * draws[:, 1:2]
    sign = np.where(draws[:, 6:7] < 0.5, -1.0, 1.0)
    return _Scene(
        labels=labels,
        centre=(signed[:, 2:4] * (1 - radius)).astype(np.float32),
        radius=radius.astype(np.float32),
        direction=_direction(signed[:, 4], draws[:, 5]).astype(np.float32),
        background=(0.5 * signed[:, 7:10]).astype(np.float32),
        figure_contrast=(sign * (0.5 + 0.7 * draws[:, 10:13])).astype(np.float32),
        dot=(0.9 * signed[:, 13:15]).astype(np.float32),
        dot_contrast=signed[:, 15:18].astype(np.float32),
    )


def _direction(tilt: NDArray[np.float64], turn: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return cosine and sine [B, 2] of a random angle, computed without trigonometric functions.

    The half-angle formulas give an angle of up to an eighth of a turn either way (nearly uniform).
    A random number of quarter turns is added.
    """
    half = tilt * _TAN_22_5
    cosine, sine = (1 - half**2) / (1 + half**2), 2 * half / (1 + half**2)
    quarters = (turn * 4).astype(np.int64)
    swapped = quarters % 2 == 1
    cosine, sine = np.where(swapped, -sine, cosine), np.where(swapped, cosine, sine)
    return np.stack([cosine, sine], axis=1) * np.where(quarters < 2, 1.0, -1.0)[:, None]


def _cover_figure(scene: _Scene, size: int) -> F32:
    """Return the fraction of each pixel that the figure covers, [B, size, size]."""
    axis = _pixel_centres(size)
    horizontal = (axis - scene.centre[:, 0:1]) / scene.radius
    vertical = (axis - scene.centre[:, 1:2]) / scene.radius
    cosine, sine = scene.direction[:, 0:1], scene.direction[:, 1:2]
    x = (horizontal * cosine)[:, None, :] + (vertical * sine)[:, :, None]
    y = (vertical * cosine)[:, :, None] - (horizontal * sine)[:, None, :]
    edges = np.searchsorted(scene.labels, np.arange(len(_DISTANCES) + 1))
    distance = np.empty_like(x)
    for figure, start, stop in zip(_DISTANCES, edges[:-1], edges[1:], strict=True):
        if start < stop:
            distance[start:stop] = figure(x[start:stop], y[start:stop])
    distance *= scene.radius[:, :, None]
    return _soft_edge_(distance, size)


def _cover_dot(scene: _Scene, size: int) -> F32:
    axis = _pixel_centres(size)
    horizontal, vertical = axis - scene.dot[:, 0:1], axis - scene.dot[:, 1:2]
    distance = (horizontal * horizontal)[:, None, :] + (vertical * vertical)[:, :, None]
    np.sqrt(distance, out=distance)
    distance -= np.float32(0.12)
    return _soft_edge_(distance, size)


def _soft_edge_(distance: F32, size: int) -> F32:
    """Replace distances by coverage in place: an edge is one pixel wide."""
    distance *= np.float32(-size / 2)
    distance += np.float32(0.5)
    return np.clip(distance, np.float32(0), np.float32(1), out=distance)


def _pixel_centres(size: int) -> F32:
    return ((np.arange(size) * 2 + 1 - size) / size).astype(np.float32)[None, :]
