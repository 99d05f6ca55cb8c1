"""Generated images of plane figures: the embedded data set, without files and without state.

Image ``i`` is a pure function of (seed, split, i). The class is the figure; place, size, turn,
colours and even the sign of the contrast are random, and a dot lies around as a distractor, so
that no weighted sum of pixels tells the classes apart while a small convolutional net does.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from stretto.config import Config
from stretto.data.hashing import GOLDEN, U64, counters, derive_key, mix64, uniforms
from stretto.data.outlines import F32, OUTLINES
from stretto.data.source import SelfContained

_FIGURES = tuple(OUTLINES.values())
_BLOCK_PIXELS = 1 << 15
"""Pixels rendered at a time: intermediate results stay in the cache, the overhead stays small."""

_NUM_DRAWS = 18
_TAN_22_5 = 0.41421356


class ShapesConfig(Config):
    """The ``[data]`` table of a run whose ``kind`` is ``"shapes"``."""

    kind: Literal["shapes"] = "shapes"
    samples: int = Field(default=4096, ge=1)
    """Images in one training epoch."""
    test_samples: int = Field(default=1024, ge=1)
    """Images for evaluation; none of them is a training image."""
    size: int = Field(default=32, ge=8)
    """Height and width in pixels."""
    classes: int = Field(default=8, ge=2, le=len(OUTLINES))
    """How many of the figures occur."""
    noise: float = Field(default=0.1, ge=0)
    """Standard deviation of the noise on every pixel; contrasts are about 1."""
    seed: int = 0
    """Another seed is another data set."""


class Shapes(SelfContained):
    """The images of one split, rendered when asked for."""

    def __init__(self, config: ShapesConfig, *, train: bool) -> None:
        self.num_samples = config.samples if train else config.test_samples
        self.fingerprint = f"{config.model_dump_json()} {'train' if train else 'test'}"
        self._size = config.size
        self._classes = config.classes
        self._key = derive_key(config.seed, int(train))
        # Noise words follow the draws of the scene in the stream of each image; one word of
        # 64 bits is noise for four pixels.
        num_words = -(-3 * config.size**2 // 4)
        self._noise_counters = counters(_NUM_DRAWS, _NUM_DRAWS + num_words)
        # Uniform on [-1, 1) has a standard deviation of 1/sqrt(3); 16 bits make one number.
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
        """Return the images of one block: background, dot, figure over the dot, noise."""
        figure, dot = _cover_figure(scene, self._size), _cover_dot(scene, self._size)
        dot *= np.float32(1) - figure
        canvas = self._noise(keys)
        canvas += scene.background[:, :, None, None]
        canvas += scene.figure_contrast[:, :, None, None] * figure[:, None]
        canvas += scene.dot_contrast[:, :, None, None] * dot[:, None]
        return canvas

    def _noise(self, keys: U64) -> F32:
        words = mix64(keys[:, None] + self._noise_counters).astype("<u8", copy=False)
        levels = words.view("<i2")[:, : 3 * self._size**2]
        noise = levels.astype(np.float32)
        noise *= self._noise_scale
        return noise.reshape(-1, 3, self._size, self._size)


@dataclass(frozen=True, slots=True, eq=False)
class _Scene:
    """What is on the images of a block, one row per image, rows in order of class.

    Places and radii are in units of half the image's side, the origin in its middle.
    """

    labels: NDArray[np.int64]
    place: F32
    radius: F32
    direction: F32
    background: F32
    figure_contrast: F32
    dot: F32
    dot_contrast: F32


def _scene(labels: NDArray[np.int64], draws: NDArray[np.float64]) -> _Scene:
    """Turn draws in [0, 1) into the things they stand for."""
    signed = 2 * draws - 1
    radius = 0.45 + 0.25 * draws[:, 1:2]
    sign = np.where(draws[:, 6:7] < 0.5, -1.0, 1.0)
    return _Scene(
        labels=labels,
        place=(signed[:, 2:4] * (1 - radius)).astype(np.float32),
        radius=radius.astype(np.float32),
        direction=_direction(signed[:, 4], draws[:, 5]).astype(np.float32),
        background=(0.5 * signed[:, 7:10]).astype(np.float32),
        figure_contrast=(sign * (0.5 + 0.7 * draws[:, 10:13])).astype(np.float32),
        dot=(0.9 * signed[:, 13:15]).astype(np.float32),
        dot_contrast=signed[:, 15:18].astype(np.float32),
    )


def _direction(tilt: NDArray[np.float64], turn: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return cosine and sine [B, 2] of a random angle, made of divisions only.

    The half-angle formulas give up to an eighth of a turn either way (nearly uniform), and
    whole quarter turns are added.
    """
    half = tilt * _TAN_22_5
    cosine, sine = (1 - half**2) / (1 + half**2), 2 * half / (1 + half**2)
    quarters = (turn * 4).astype(np.int64)
    swapped = quarters % 2 == 1
    cosine, sine = np.where(swapped, -sine, cosine), np.where(swapped, cosine, sine)
    return np.stack([cosine, sine], axis=1) * np.where(quarters < 2, 1.0, -1.0)[:, None]


def _cover_figure(scene: _Scene, size: int) -> F32:
    """Return the share of each pixel that the figure covers, [B, size, size]."""
    axis = _pixel_centres(size)
    across = (axis - scene.place[:, 0:1]) / scene.radius
    down = (axis - scene.place[:, 1:2]) / scene.radius
    cosine, sine = scene.direction[:, 0:1], scene.direction[:, 1:2]
    x = (across * cosine)[:, None, :] + (down * sine)[:, :, None]
    y = (down * cosine)[:, :, None] - (across * sine)[:, None, :]
    edges = np.searchsorted(scene.labels, np.arange(len(_FIGURES) + 1))
    distance = np.empty_like(x)
    for outline, start, stop in zip(_FIGURES, edges[:-1], edges[1:], strict=True):
        if start < stop:
            distance[start:stop] = outline(x[start:stop], y[start:stop])
    distance *= scene.radius[:, :, None]
    return _soft_edge_(distance, size)


def _cover_dot(scene: _Scene, size: int) -> F32:
    axis = _pixel_centres(size)
    across, down = axis - scene.dot[:, 0:1], axis - scene.dot[:, 1:2]
    distance = (across * across)[:, None, :] + (down * down)[:, :, None]
    np.sqrt(distance, out=distance)
    distance -= np.float32(0.12)
    return _soft_edge_(distance, size)


def _soft_edge_(distance: F32, size: int) -> F32:
    """Replace distances by coverage: an edge is one pixel wide."""
    distance *= np.float32(-size / 2)
    distance += np.float32(0.5)
    return np.clip(distance, np.float32(0), np.float32(1), out=distance)


def _pixel_centres(size: int) -> F32:
    return ((np.arange(size) * 2 + 1 - size) / size).astype(np.float32)[None, :]
