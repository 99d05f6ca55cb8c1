"""A line through the seconds of real messages of several sizes: latency, and seconds per byte."""

import statistics
from collections.abc import Callable, Sequence

from stretto.plan.linking import Line

SIZES = tuple(64_000 * 2**power for power in range(10))
"""Bytes of a block, from nearly all latency to nearly all bytes."""
_FEWEST = 4
_LONG_S = 0.2
"""Larger ones than the first that takes so long tell nothing new, and take their time."""


def measure_line(
    seconds_of: Callable[[int], float],
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    say: Callable[[str], None] = lambda _line: None,
) -> Line:
    """Return the line through the medians of what messages of each size take.

    ``seconds_of`` carries one message of so many bytes and returns its seconds, the same number on
    every rank: whether larger ones follow is decided by it. Once for each size, nobody counts.
    """
    points: list[tuple[int, float]] = []
    for size in sizes:
        seconds_of(size)
        middle_s = statistics.median(seconds_of(size) for _ in range(repeats))
        points.append((size, middle_s))
        say(f"messages of {size / 1e6:.2g} MB: {middle_s * 1e3:.3g} ms")
        if middle_s > _LONG_S and len(points) >= _FEWEST:
            break
    return fit_line(points)


def fit_line(points: Sequence[tuple[int, float]]) -> Line:
    """Return the line nearest to ``points`` of bytes and seconds, by the squares of its errors.

    Errors are taken relative to the seconds: a small message counts as much as a large one. Neither
    part is negative: where the line would begin below zero, it begins there.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    mean_x = _mean([float(size) for size, _ in points], weights)
    mean_y = _mean([seconds for _, seconds in points], weights)
    along = _mean([(size - mean_x) * (s - mean_y) for size, s in points], weights)
    across = _mean([(size - mean_x) ** 2 for size, _ in points], weights)
    slope = along / across if across else 0.0
    if slope <= 0 or mean_y < slope * mean_x:
        return Line(0.0, _through_zero(points, weights))
    return Line(mean_y - slope * mean_x, slope)


def _through_zero(points: Sequence[tuple[int, float]], weights: Sequence[float]) -> float:
    products = _mean([size * seconds for size, seconds in points], weights)
    return products / _mean([float(size) ** 2 for size, _ in points], weights)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
