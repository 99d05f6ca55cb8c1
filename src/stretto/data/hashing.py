"""Counter-based random numbers: each one is a hash of its coordinates, so no generator has a state.

The hash is the output function of SplitMix64 (Steele, Lea and Flood, 2014,
doi:10.1145/2660193.2660195). It is written out here, in integer arithmetic, because the order of
samples must be the same under every version of every library.
"""

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""SplitMix64's increment: its consecutive multiples are the counter values that are hashed."""

_MASK = (1 << 64) - 1


def mix64(values: U64) -> U64:
    """Return each 64-bit value scrambled by a bijection; ``values`` must not be a scalar."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def derive_key(*coordinates: int) -> U64:
    """Return a 64-bit key (an array of length 1): a hash of all coordinates in their order."""
    state = np.zeros(1, dtype=np.uint64)
    for coordinate in coordinates:
        state = mix64((state ^ np.uint64(coordinate & _MASK)) + GOLDEN)
    return state


def counters(start: int, stop: int) -> U64:
    """Return the counter values of draws ``start`` to ``stop``; add them to a key."""
    return np.arange(start + 1, stop + 1, dtype=np.uint64) * GOLDEN


def uniforms(values: U64) -> NDArray[np.float64]:
    """Return each 64-bit value as a number in [0, 1)."""
    return (values >> np.uint64(11)).astype(np.float64) * 2.0**-53
