"""Which runs a study still needs, as a pure function of those that are done.

A *point* is what is compared: a strategy at a number of workers and a batch. At each point the rate
is swept with the first seed, as factors of the run's own, and the sweep goes on outwards until its
best is not at an edge: a method that was given too small a range would look worse than it is. Then
the other seeds run at the best rate.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STEP = 2.0
"""From one factor of the rate to the next, where a sweep goes on outwards."""


@dataclass(frozen=True, slots=True)
class Point:
    """What is compared."""

    strategy: str
    """A kind, with settings: "crossover:groups=8"."""
    workers: int
    batch: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    point: Point
    factor: float
    """Of the rate that the run file comes to."""
    seed: int


@dataclass(frozen=True, slots=True)
class Done:
    """What a run came to."""

    accuracy: float
    """Of the mean of all models; 0 where the run diverged."""
    own_accuracy: float | None = None
    loss: float | None = None
    apart: tuple[tuple[int, float], ...] = ()
    """After which step, how far models were from their mean."""
    seconds: float = 0.0
    samples_per_s: float = 0.0
    diverged: str = ""


@dataclass(frozen=True, slots=True)
class Sweep:
    """How rates and seeds are gone through."""

    factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    seeds: int = 3
    most: int = 9
    """Rates of one point, at most."""

    def wanted(self, point: Point, done: Mapping[Cell, Done]) -> list[Cell]:
        """Return the runs that ``point`` needs next; none when it is finished.

        Those that are returned may run beside each other.
        """
        missing = [cell for factor in self.factors if (cell := Cell(point, factor, 0)) not in done]
        if missing:
            return missing
        tried = swept(point, done)
        best = best_factor(tried)
        further = self._further(sorted(tried), best)
        if further is not None and len(tried) < self.most:
            return [Cell(point, further, 0)]
        seeds = (Cell(point, best, seed) for seed in range(self.seeds))
        return [cell for cell in seeds if cell not in done]

    @staticmethod
    def _further(tried: Sequence[float], best: float) -> float | None:
        """Return the next rate outwards, where the best is the last one tried on its side."""
        if best == tried[-1]:
            return best * STEP
        if best == tried[0]:
            return best / STEP
        return None


@dataclass(frozen=True, slots=True)
class Summary:
    """What a point came to, over seeds, at its best rate."""

    point: Point
    factor: float
    interior: bool
    """Whether rates on both sides were tried and were worse."""
    accuracies: tuple[float, ...]
    own_accuracies: tuple[float, ...]
    apart: float | None
    """At the end, the mean over seeds."""

    @property
    def mean(self) -> float:
        """The mean accuracy over seeds."""
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float:
        """The standard deviation over seeds; 0 of a single one."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


def summarise(point: Point, done: Mapping[Cell, Done]) -> Summary | None:
    """Return what ``point`` has come to so far; None before its first run."""
    tried = swept(point, done)
    if not tried:
        return None
    best = best_factor(tried)
    found = [one for cell, one in done.items() if cell.point == point and cell.factor == best]
    ends = [one.apart[-1][1] for one in found if one.apart]
    return Summary(
        point,
        best,
        min(tried) < best < max(tried),
        tuple(one.accuracy for one in found),
        tuple(one.own_accuracy for one in found if one.own_accuracy is not None),
        statistics.fmean(ends) if ends else None,
    )


def swept(point: Point, done: Mapping[Cell, Done]) -> dict[float, float]:
    """Return the accuracy of the first seed by factor."""
    return {
        cell.factor: one.accuracy
        for cell, one in done.items()
        if cell.point == point and cell.seed == 0
    }


def best_factor(tried: Mapping[float, float]) -> float:
    """Return the factor of the best accuracy; of equal ones the smaller."""
    return min(tried, key=lambda factor: (-tried[factor], factor))
