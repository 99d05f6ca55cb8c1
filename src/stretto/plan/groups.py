"""Neighbours as groups, so that a model of any depth is a problem of bounded size."""

from collections.abc import Sequence


def group_units(weights: Sequence[float], most: int) -> list[range]:
    """Return at most ``most`` groups of neighbours, the heaviest as light as can be."""
    count = len(weights)
    if count <= most:
        return [range(i, i + 1) for i in range(count)]
    low, high = max(max(weights), sum(weights) / most), sum(weights)
    groups = _cut(weights, high)
    for _ in range(40):
        middle = (low + high) / 2
        tried = _cut(weights, middle)
        if len(tried) <= most:
            groups, high = tried, middle
        else:
            low = middle
    return groups


def _cut(weights: Sequence[float], limit: float) -> list[range]:
    groups: list[range] = []
    start, filled = 0, 0.0
    for index, weight in enumerate(weights):
        if index > start and filled + weight > limit:
            groups.append(range(start, index))
            start, filled = index, 0.0
        filled += weight
    groups.append(range(start, len(weights)))
    return groups
