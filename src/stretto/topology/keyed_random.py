"""Random numbers that are equal on all ranks: each depends on (seed, step, segment) only.

With a sequential generator, ranks would differ forever once one of them skips a step. Philox
(Salmon et al., 2011, doi:10.1145/2063384.2063405) is counter-based: its counter starts at
(step, segment). NumPy guarantees its raw 64-bit words for all versions, so only these are used;
permutations and indices are computed from them here.
"""

from functools import lru_cache

import numpy as np

DRAW_CACHE_SIZE = 64
"""Cache size of functions that draw for all ranks: virtual workers ask for every rank."""

_MASK = (1 << 64) - 1


def random_words(count: int, *, seed: int, step: int, segment: int) -> list[int]:
    """Return ``count`` random 64-bit words."""
    key = np.array([seed & _MASK, 0], dtype=np.uint64)
    counter = np.array([0, step & _MASK, segment & _MASK, 0], dtype=np.uint64)
    drawn: list[int] = np.random.Philox(key=key, counter=counter).random_raw(count).tolist()
    return drawn


def word_to_index(bound: int, word: int) -> int:
    """Return ``word`` scaled to an integer in [0, bound), with a bias of at most bound / 2^64."""
    return word * bound >> 64


def no_period(_size: int) -> None:
    """Return None: random peers have no period."""


@lru_cache(maxsize=DRAW_CACHE_SIZE)
def random_cycle(size: int, seed: int, step: int, segment: int) -> tuple[int, ...]:
    """Return a uniformly random cycle p of length n, which maps i to p[i].

    Sattolo, 1986, doi:10.1016/0020-0190(86)90073-6: a shuffle that moves every element.
    """
    return _shuffle(size, random_words(size, seed=seed, step=step, segment=segment), may_stay=0)


@lru_cache(maxsize=DRAW_CACHE_SIZE)
def random_permutation(size: int, seed: int, step: int, segment: int) -> tuple[int, ...]:
    """Return a uniformly random permutation of n elements."""
    return _shuffle(size, random_words(size, seed=seed, step=step, segment=segment), may_stay=1)


def _shuffle(size: int, drawn: list[int], may_stay: int) -> tuple[int, ...]:
    order = list(range(size))
    for i in range(size - 1, 0, -1):
        j = word_to_index(i + may_stay, drawn[i])
        order[i], order[j] = order[j], order[i]
    return tuple(order)
