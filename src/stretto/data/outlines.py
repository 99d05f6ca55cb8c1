"""Outlines of plane figures as signed distances: below zero inside, above zero outside.

Figures fit in the unit disc. Only operations that IEEE 754 rounds exactly are used (no sine, no
exponential), so that a pixel has the same bits on every machine and in every batch.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Outline = Callable[[F32, F32], F32]
"""(x, y) of each pixel, the figure upright at the origin -> distance to its edge."""


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
    beside = np.abs(np.abs(y) - np.float32(0.5)) - np.float32(0.22)
    return np.maximum(np.abs(x) - np.float32(0.68), beside)


def _frame(x: F32, y: F32) -> F32:
    return np.abs(np.maximum(np.abs(x), np.abs(y)) - np.float32(0.54)) - np.float32(0.16)


OUTLINES: Mapping[str, Outline] = {
    "disc": _disc,
    "cross": _cross,
    "ring": _ring,
    "triangle": _triangle,
    "bars": _bars,
    "star": _star,
    "square": _square,
    "frame": _frame,
}
"""Every figure by name; a figure's place in this table is its class."""
