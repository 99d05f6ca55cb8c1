"""A round of all ranks at once, as arrays: for whoever has the values of all of them stacked."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.topology.mixing import Mixing


class Heard(NamedTuple):
    """Who hears whom in one round; rows are ranks.

    Where a rank hears fewer than others, it hears itself, with a weight of 0.
    """

    own: NDArray[np.float64]
    """[n]: what a rank's value weighs for itself."""
    who: NDArray[np.int64]
    """[n, k]: whom it hears."""
    weights: NDArray[np.float64]
    """[n, k]: what their values weigh there."""


def heard(mixing: Mixing, size: int, step: int, segment: int = 0) -> Heard:
    """Return one round of ``size`` ranks."""
    peers = [mixing(rank, size, step, segment) for rank in range(size)]
    most = max(len(each.receives) for each in peers)
    who = np.repeat(np.arange(size)[:, None], most, axis=1)
    weights = np.zeros((size, most))
    for rank, each in enumerate(peers):
        for place, edge in enumerate(each.receives):
            who[rank, place], weights[rank, place] = edge
    return Heard(np.array([each.own for each in peers]), who, weights)
