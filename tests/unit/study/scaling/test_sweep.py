"""Which runs a study needs next: rates outwards until the best is inside, then seeds."""

import pytest

from stretto.study.scaling.sweep import Cell, Done, Point, Sweep, summarise

POINT = Point("crossover", 8, 1024)


def carried_out(sweep, accuracy_of, most_runs=50):
    """Run what is wanted until nothing is; return what was done."""
    done = {}
    while wanted := sweep.wanted(POINT, done):
        assert len(done) < most_runs
        for cell in wanted:
            done[cell] = Done(accuracy_of(cell.factor) + cell.seed / 100)
    return done


def hill(top):
    return lambda factor: 1 / (1 + abs(factor - top))


@pytest.mark.parametrize("top", [0.1, 0.5, 1.0, 2.0, 7.9, 16.0])
def test_a_sweep_ends_with_its_best_inside(top):
    done = carried_out(Sweep(seeds=3), hill(top))
    found = summarise(POINT, done)
    assert found.interior
    tried = {cell.factor for cell in done}
    assert hill(top)(found.factor) == max(map(hill(top), tried))


def test_other_seeds_run_at_the_best_rate_only():
    done = carried_out(Sweep(seeds=3), hill(1.0))
    assert {cell for cell in done if cell.seed} == {Cell(POINT, 1.0, 1), Cell(POINT, 1.0, 2)}
    found = summarise(POINT, done)
    assert found.accuracies == (1.0, 1.01, 1.02)
    assert found.mean == pytest.approx(1.01)
    assert found.spread == pytest.approx(0.01)


def test_a_sweep_without_a_top_is_given_up_and_says_so():
    done = carried_out(Sweep(seeds=1, most=5), lambda factor: factor)
    assert len(done) == 5
    assert not summarise(POINT, done).interior


def test_of_equal_rates_the_smaller_counts_and_the_sweep_goes_on_below():
    done = carried_out(Sweep(seeds=1, most=4), lambda factor: 0.1)
    assert min(cell.factor for cell in done) == 0.25
    assert summarise(POINT, {}) is None


def test_how_far_models_are_apart_is_told_at_the_end():
    cell = Cell(POINT, 1.0, 0)
    found = summarise(POINT, {cell: Done(0.5, 0.4, 1.0, ((10, 0.2), (20, 0.1)))})
    assert (found.apart, found.own_accuracies) == (0.1, (0.4,))
