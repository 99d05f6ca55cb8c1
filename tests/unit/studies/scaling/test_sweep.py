"""The runs that a study needs next: wider rates until the best is inside, then seeds."""

import pytest

from stretto.studies.scaling_sweep import FactorSweep, GridCell, RunResult, StudyPoint, summarise

POINT = StudyPoint("crossover", 8, 1024)


def run_sweep(sweep, accuracy_of, most_runs=50):
    """Run what the sweep needs until it needs nothing; return the results."""
    done = {}
    while next_runs := sweep.next_runs(POINT, done):
        assert len(done) < most_runs
        for cell in next_runs:
            done[cell] = RunResult(accuracy_of(cell.factor) + cell.seed / 100)
    return done


def hill(top):
    return lambda factor: 1 / (1 + abs(factor - top))


@pytest.mark.parametrize("top", [0.1, 0.5, 1.0, 2.0, 7.9, 16.0])
def test_a_sweep_ends_with_its_best_inside(top):
    done = run_sweep(FactorSweep(seeds=3), hill(top))
    found = summarise(POINT, done)
    assert found.is_interior
    tried = {cell.factor for cell in done}
    assert hill(top)(found.factor) == max(map(hill(top), tried))


def test_other_seeds_run_at_the_best_rate_only():
    done = run_sweep(FactorSweep(seeds=3), hill(1.0))
    assert {cell for cell in done if cell.seed} == {
        GridCell(POINT, 1.0, 1),
        GridCell(POINT, 1.0, 2),
    }
    found = summarise(POINT, done)
    assert found.accuracies == (1.0, 1.01, 1.02)
    assert found.mean == pytest.approx(1.01)
    assert found.spread == pytest.approx(0.01)


def test_a_sweep_without_a_maximum_stops_and_is_reported():
    done = run_sweep(FactorSweep(seeds=1, max_factors=5), lambda factor: factor)
    assert len(done) == 5
    assert not summarise(POINT, done).is_interior


def test_of_equal_rates_the_smaller_wins_and_the_sweep_continues_below():
    done = run_sweep(FactorSweep(seeds=1, max_factors=4), lambda factor: 0.1)
    assert min(cell.factor for cell in done) == 0.25
    assert summarise(POINT, {}) is None


def test_the_consensus_distance_is_that_at_the_end():
    cell = GridCell(POINT, 1.0, 0)
    found = summarise(POINT, {cell: RunResult(0.5, 0.4, 1.0, ((10, 0.2), (20, 0.1)))})
    assert (found.consensus_distance, found.local_accuracies) == (0.1, (0.4,))
