"""Draws that every rank makes alike: each follows from (seed, step, segment), none from another.

A generator that is consumed in turn would set ranks apart for good as soon as one of them skips a
step. Philox (Salmon et al., 2011, doi:10.1145/2063384.2063405) has no state but its counter, which
begins at (step, segment). Of numpy only the words are used, which it keeps the same in all
versions; what is made of them is written out here.
"""

from functools import lru_cache

import numpy as np

REMEMBERED = 64
"""Draws kept by each function that makes one for all ranks: virtual workers ask for every rank."""

_MASK = (1 << 64) - 1


def words(count: int, *, seed: int, step: int, segment: int) -> list[int]:
    """Return ``count`` random words of 64 bits."""
    key = np.array([seed & _MASK, 0], dtype=np.uint64)
    counter = np.array([0, step & _MASK, segment & _MASK, 0], dtype=np.uint64)
    drawn: list[int] = np.random.Philox(key=key, counter=counter).random_raw(count).tolist()
    return drawn


def below(bound: int, word: int) -> int:
    """Return ``word`` as a number in [0, bound); uneven by bound / 2^64 at most."""
    return word * bound >> 64


def no_period(_size: int) -> None:
    """Return the period of what is drawn: there is none."""


@lru_cache(maxsize=REMEMBERED)
def cycle(size: int, seed: int, step: int, segment: int) -> tuple[int, ...]:
    """Return one of the (n-1)! cycles through all of n places, each as likely: i goes to p[i].

    Sattolo, 1986, doi:10.1016/0020-0190(86)90073-6: a shuffle in which nothing may stay.
    """
    return _shuffled(size, words(size, seed=seed, step=step, segment=segment), may_stay=0)


@lru_cache(maxsize=REMEMBERED)
def permutation(size: int, seed: int, step: int, segment: int) -> tuple[int, ...]:
    """Return one of the n! orders of n places, each as likely."""
    return _shuffled(size, words(size, seed=seed, step=step, segment=segment), may_stay=1)


def _shuffled(size: int, drawn: list[int], may_stay: int) -> tuple[int, ...]:
    order = list(range(size))
    for i in range(size - 1, 0, -1):
        j = below(i + may_stay, drawn[i])
        order[i], order[j] = order[j], order[i]
    return tuple(order)
