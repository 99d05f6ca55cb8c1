"""How far ranks are from their mean, estimated from a few of their parameters.

Every rank looks at the same coordinates and all add up what they see, in one small message that is
read a step later. With x_i rank i's values, m their mean and w how many coordinates each one that
is looked at stands for, the mean square distance from m is

    far = (1/n) sum over ranks of (sum of w x_i^2)  -  sum of w m^2

and the squared norm of the mean is that of ranks' own models, which each knows in full, less far.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.comm.channel import Channel, Pending
from stretto.errors import ChannelError

FEWEST = 8
"""Coordinates of a segment that are looked at, however small their share: all, if it has fewer."""
_AT_ONCE = 1 << 20
"""Indices hashed at a time."""


def chosen(first: int, count: int, share: float) -> NDArray[np.int64]:
    """Return which of ``count`` coordinates from index ``first`` on are looked at, from 0 on.

    Those whose index hashes to less than ``share``; at least the `FEWEST` that hash to the least.
    """
    blocks = range(0, count, _AT_ONCE)
    found = [
        start + np.flatnonzero(_hashed(first + start, min(_AT_ONCE, count - start)) < share)
        for start in blocks
    ]
    below = np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
    if len(below) >= min(FEWEST, count):
        return below
    return np.sort(np.argsort(_hashed(first, count), kind="stable")[:FEWEST])


class Sampled(NamedTuple):
    """The coordinates of all segments that are looked at."""

    places: list[NDArray[np.int64]]
    """Of each segment, from 0 on."""
    weights: NDArray[np.float64]
    """How many coordinates each of all these stands for."""


def sampled(sizes: Sequence[int], share: float) -> Sampled:
    """Return what is looked at of segments of these sizes, in this order."""
    firsts = np.cumsum([0, *sizes]).tolist()
    places = [chosen(at, count, share) for at, count in zip(firsts, sizes, strict=False)]
    counts = [len(place) for place in places]
    stands_for = [size / max(1, count) for size, count in zip(sizes, counts, strict=True)]
    return Sampled(places, np.repeat(np.array(stands_for), counts))


def _hashed(first: int, count: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each index, by the finalizer of SplitMix64.

    Steele, Lea and Flood, 2014, doi:10.1145/2660193.2660195.
    """
    word = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    word ^= word >> np.uint64(31)
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53


def distance(
    totals: NDArray[np.float64],
    weights: NDArray[np.float64],
    squares: float,
    norms: float,
    size: int,
) -> float:
    """Return the distance from the mean, as a share of its norm, from sums over ``size`` ranks.

    Of the sample, of its weighted squares, and of squared norms. Rounded once at the end of a sum:
    ranks on other processors would add in another order, and one of them might decide otherwise.
    """
    mean = totals / size
    far = max(0.0, squares / size - math.fsum((weights * (mean * mean)).tolist()))
    norm = norms / size - far
    if norm <= 0:
        return math.inf if far else 0.0
    return math.sqrt(far / norm)


class _Look(NamedTuple):
    """A parameter, the flat indices at which it is looked at, and where what is seen goes."""

    value: Tensor
    at: Tensor
    into: Tensor


class Consensus:
    """Tells a few parameters of every segment to all, and learns how far apart all are."""

    def __init__(
        self, segments: Sequence[Sequence[Tensor]], share: float, channel: Channel
    ) -> None:
        self._channel = channel
        self._pending: Pending | None = None
        sizes = [sum(value.numel() for value in values) for values in segments]
        places, self._weights = sampled(sizes, share)
        counts = [len(place) for place in places]
        device = segments[0][0].device if segments else torch.device("cpu")
        self._seen = torch.zeros(sum(counts), dtype=torch.float64, device=device)
        self._norms = torch.zeros(len(segments), dtype=torch.float64, device=device)
        self._told = torch.zeros(sum(counts) + 2, dtype=torch.float64, device=device)
        self._weigh = torch.from_numpy(self._weights).to(device)
        seen = self._seen.split(counts)
        self._segments = [list(values) for values in segments]
        self._looks = [
            list(_looks(*each)) for each in zip(self._segments, places, seen, strict=True)
        ]

    @torch.no_grad()
    def see(self, segment: int) -> None:
        """Look at a segment as it is now."""
        for look in self._looks[segment]:
            look.into.copy_(torch.take(look.value, look.at))
        norms = torch._foreach_norm(self._segments[segment], 2, torch.float64)
        self._norms[segment] = torch.stack(norms).square().sum()

    def tell(self) -> None:
        """Begin to add up what all ranks have seen of their segments."""
        self._told[:-2] = self._seen
        self._told[-2] = (self._weigh * self._seen.square()).sum()
        self._told[-1] = self._norms.sum()
        self._pending = self._channel.start_all_reduce(self._told)

    def read(self) -> float | None:
        """Return how far apart ranks were; None where nothing has been told since."""
        if self._pending is None:
            return None
        self._pending.wait()
        self._pending = None
        sums = self._told.cpu().numpy()
        squares, norms = sums[-2:].tolist()
        return distance(sums[:-2], self._weights, squares, norms, self._channel.size)

    def close(self) -> None:
        """Wait for what is under way."""
        with suppress(ChannelError):  # nobody needs it any more
            self.read()


def _looks(values: Sequence[Tensor], places: NDArray[np.int64], seen: Tensor) -> Iterator[_Look]:
    """Yield each parameter of a segment with its own part of what is looked at."""
    ends = np.cumsum([0, *(value.numel() for value in values)])
    cuts = np.searchsorted(places, ends).tolist()
    for value, first, start, end in zip(values, ends, cuts[:-1], cuts[1:], strict=False):
        at = torch.from_numpy(places[start:end] - first).to(value.device)
        yield _Look(value, at, seen[start:end])
