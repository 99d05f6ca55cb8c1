"""Decide which runs a scaling study still needs, as a pure function of the finished runs.

A point is a strategy at a number of workers and a batch size. The study sweeps the learning rate of
each point with the first seed, as factors of the run file's rate. The sweep widens until the best
rate is not at its edge, because too narrow a range would make a method look worse than it is. Then
the other seeds run at the best rate.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FACTOR_STEP = 2.0
"""Ratio between neighbouring factors of the rate when a sweep widens."""


@dataclass(frozen=True, slots=True)
class StudyPoint:
    """A strategy at a number of workers and a batch size."""

    strategy: str
    """A kind with settings, such as "crossover:groups=8"."""
    workers: int
    batch: int


@dataclass(frozen=True, slots=True)
class GridCell:
    """One run of a study."""

    point: StudyPoint
    factor: float
    """Factor on the learning rate of the run file."""
    seed: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of one run."""

    accuracy: float
    """Accuracy of the mean of all workers' models; 0 if the run diverged."""
    local_accuracy: float | None = None
    """Mean accuracy of the workers' models."""
    loss: float | None = None
    consensus_distance: tuple[tuple[int, float], ...] = ()
    """(step, distance of the workers' models from their mean) for several steps."""
    seconds: float = 0.0
    samples_per_s: float = 0.0
    diverged: str = ""
    """Why the run has no result; empty if it has one."""


@dataclass(frozen=True, slots=True)
class FactorSweep:
    """The rule by which rates and seeds are chosen."""

    factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Factors of the learning rate that every point tries first."""
    seeds: int = 3
    max_factors: int = 9
    """Most rates tried for one point."""

    def next_runs(self, point: StudyPoint, done: Mapping[GridCell, RunResult]) -> list[GridCell]:
        """Return the runs that ``point`` needs next; none when it is finished.

        The returned runs may run at the same time.
        """
        missing = [
            cell for factor in self.factors if (cell := GridCell(point, factor, 0)) not in done
        ]
        if missing:
            return missing
        tried = accuracy_by_factor(point, done)
        best = best_factor(tried)
        next_factor = self._next_factor(sorted(tried), best)
        if next_factor is not None and len(tried) < self.max_factors:
            return [GridCell(point, next_factor, 0)]
        seeds = (GridCell(point, best, seed) for seed in range(self.seeds))
        return [cell for cell in seeds if cell not in done]

    @staticmethod
    def _next_factor(tried: Sequence[float], best: float) -> float | None:
        """Return the next factor beyond the edge if the best one is at an edge, else None."""
        if best == tried[-1]:
            return best * FACTOR_STEP
        if best == tried[0]:
            return best / FACTOR_STEP
        return None


@dataclass(frozen=True, slots=True)
class PointSummary:
    """The results of a point over all seeds at its best rate."""

    point: StudyPoint
    factor: float
    is_interior: bool
    """Whether rates on both sides of the best one were tried."""
    accuracies: tuple[float, ...]
    local_accuracies: tuple[float, ...]
    consensus_distance: float | None
    """Final distance of the models from their mean, averaged over seeds."""

    @property
    def mean(self) -> float:
        """The mean accuracy over seeds."""
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float:
        """The standard deviation over seeds; 0 for a single seed."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


def summarise(point: StudyPoint, done: Mapping[GridCell, RunResult]) -> PointSummary | None:
    """Return the results of ``point`` so far; None before its first run."""
    tried = accuracy_by_factor(point, done)
    if not tried:
        return None
    best = best_factor(tried)
    found = [one for cell, one in done.items() if cell.point == point and cell.factor == best]
    ends = [one.consensus_distance[-1][1] for one in found if one.consensus_distance]
    return PointSummary(
        point,
        best,
        min(tried) < best < max(tried),
        tuple(one.accuracy for one in found),
        tuple(one.local_accuracy for one in found if one.local_accuracy is not None),
        statistics.fmean(ends) if ends else None,
    )


def accuracy_by_factor(point: StudyPoint, done: Mapping[GridCell, RunResult]) -> dict[float, float]:
    """Return the accuracy of the first seed for each factor."""
    return {
        cell.factor: one.accuracy
        for cell, one in done.items()
        if cell.point == point and cell.seed == 0
    }


def best_factor(tried: Mapping[float, float]) -> float:
    """Return the factor with the best accuracy; the smallest of equal ones."""
    return min(tried, key=lambda factor: (-tried[factor], factor))
