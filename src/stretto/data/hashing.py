"""Random numbers without a generator: each is a hash of its coordinates, so order never matters.

The hash is the output function of SplitMix64 (Steele, Lea and Flood, 2014,
doi:10.1145/2660193.2660195). It is written out here, in integer arithmetic, because a sample
order must be the same under every version of every library.
"""

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""SplitMix64's increment: consecutive multiples of it are the counter that gets hashed."""

_MASK = (1 << 64) - 1


def mix64(words: U64) -> U64:
    """Return each word scrambled by a bijection of 64 bits; ``words`` must not be a scalar."""
    mixed = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def derive_key(*coordinates: int) -> U64:
    """Return one word (an array of length 1) that depends on every coordinate and their order."""
    state = np.zeros(1, dtype=np.uint64)
    for coordinate in coordinates:
        state = mix64((state ^ np.uint64(coordinate & _MASK)) + GOLDEN)
    return state


def counters(start: int, stop: int) -> U64:
    """Return the counter values of draws ``start`` to ``stop``, to be added to a key."""
    return np.arange(start + 1, stop + 1, dtype=np.uint64) * GOLDEN


def uniforms(words: U64) -> NDArray[np.float64]:
    """Return each word as a number in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
