"""Problems solved in a child process, and planning without that process."""

import io
import signal

import numpy as np
import psutil
import pytest

from stretto.planner import solver as solving
from stretto.planner.check import check
from stretto.planner.memory import Footprints
from stretto.planner.planner import make_plan
from stretto.planner.presets import PresetOptions, preset_plan
from stretto.planner.profile import Link, Profile, UnitCost
from stretto.planner.solver import Solver
from stretto.planner.timing import time_plan

UNITS = tuple(
    UnitCost(name=f"u{i}", numel=n, forward_s=0.01, backward_s=0.02, activation_bytes=100_000)
    for i, n in enumerate((300_000, 40_000, 500_000, 90_000))
)
PROFILE = Profile(units=UNITS, link=Link(ranks=4, bytes_per_s=5e7), state_bytes=8)


def arrays(cost, matrix, lower, upper_rows, upper=(1.0, 1.0, 1.0)):
    """Return a problem: minimise ``cost`` with rows of ``matrix`` between their bounds."""
    matrix = np.array(matrix, dtype=float)
    rows, columns = np.nonzero(matrix)
    return {
        "cost": np.array(cost, dtype=float),
        "upper": np.array(upper[: len(cost)], dtype=float),
        "integral": np.ones(len(cost)),
        "rows": rows.astype(float),
        "columns": columns.astype(float),
        "values": matrix[rows, columns],
        "lower": np.array(lower, dtype=float),
        "upper_rows": np.array(upper_rows, dtype=float),
        "gap": np.array([0.0]),
    }


KNAPSACK = arrays([-5, -4, -3], [[2, 3, 1]], [-np.inf], [5])
"""Items worth 5, 4 and 3 that weigh 2, 3 and 1; the knapsack carries 5."""


@pytest.fixture(scope="module")
def solver():
    with Solver() as solver:
        yield solver


def test_fractions_by_hand(solver):
    # The first, the third, and two thirds of the second; one more unit adds a third of the second.
    found = solver.solve(KNAPSACK, integral=False, limit_s=10)
    assert found.x == pytest.approx([1, 2 / 3, 1])
    assert found.bound == pytest.approx(-5 - 3 - 4 * 2 / 3)
    assert found.duals == pytest.approx([4 / 3])


def test_whole_numbers_by_hand(solver):
    found = solver.solve(KNAPSACK, integral=True, limit_s=10)
    assert found.x == pytest.approx([1, 1, 0])
    assert found.bound == pytest.approx(-9)


def test_every_row_keeps_its_dual_and_only_upper_bounds_have_one(solver):
    # Rows: x + y = 1; y >= 0.25; x <= 0.5; x + z <= 9, which is never tight.
    matrix = [[1, 1, 0], [0, 1, 0], [1, 0, 0], [1, 0, 1]]
    lower, upper = [1, 0.25, -np.inf, -np.inf], [1, np.inf, 0.5, 9]
    problem = arrays([1, 3, 1], matrix, lower, upper)
    found = solver.solve(problem, integral=False, limit_s=10)
    assert found.x == pytest.approx([0.5, 0.5, 0])
    assert found.bound == pytest.approx(2.0)
    # Replacing one y by one x saves 2.
    assert found.duals == pytest.approx([0, 0, 2, 0])


@pytest.mark.parametrize("integral", [False, True])
def test_an_infeasible_problem_has_no_solution_and_no_bound(solver, integral):
    impossible = arrays([1, 1, 1], [[1, 1, 1]], [4], [np.inf])
    found = solver.solve(impossible, integral=integral, limit_s=10)
    assert found.x is None
    assert found.bound == -np.inf


def test_a_solver_solves_one_problem_after_another(solver):
    for _ in range(3):
        assert solver.solve(KNAPSACK, integral=True, limit_s=10).bound == pytest.approx(-9)
        assert solver.solve(KNAPSACK, integral=False, limit_s=10).bound == pytest.approx(-32 / 3)


def running_solver():
    """Return the solver process that was started last: that of this test."""
    running = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    solvers = [child for child in running if solving.__file__ in child.cmdline()]
    return max(solvers, key=lambda child: (child.create_time(), child.pid))


def kill_and_wait(process):
    process.kill()
    assert psutil.wait_procs([process], timeout=10)[0]


def test_a_killed_solver_finds_nothing():
    with Solver() as solver:
        kill_and_wait(running_solver())
        assert solver.solve(KNAPSACK, integral=True, limit_s=10) is None
        assert solver.solve(KNAPSACK, integral=False, limit_s=10) is None


def test_a_solver_that_exceeds_its_time_is_killed(monkeypatch):
    # The process needs longer than that to start.
    monkeypatch.setattr(solving, "GRACE_S", 0.0)
    with Solver() as solver:
        process = running_solver()
        assert solver.solve(KNAPSACK, integral=True, limit_s=0.0) is None
        assert process.wait(5) == -signal.SIGKILL


def test_a_process_lives_as_long_as_its_solver():
    with Solver():
        process = running_solver()
    assert not process.is_running()


def test_a_process_that_is_kept_solves_for_the_next_solver():
    with solving.keep_solver_processes():
        with Solver() as solver:
            process = running_solver()
            assert solver.solve(KNAPSACK, integral=True, limit_s=10).bound == pytest.approx(-9)
        with Solver() as solver:
            assert running_solver() == process
            assert solver.solve(KNAPSACK, integral=True, limit_s=10).bound == pytest.approx(-9)
            kill_and_wait(process)
            assert solver.solve(KNAPSACK, integral=True, limit_s=10) is None
        with Solver() as solver:
            assert running_solver() != process
            assert solver.solve(KNAPSACK, integral=True, limit_s=10).bound == pytest.approx(-9)
            process = running_solver()
    assert not process.is_running()


@pytest.mark.parametrize("size", [0, 3, 7])
def test_an_incomplete_header_is_no_answer(size):
    written = io.BytesIO()
    solving.write_arrays(written, {"x": np.zeros(3)})
    assert solving.read_arrays(io.BytesIO(written.getvalue()[:size])) is None


def test_an_answer_is_read_as_it_was_written():
    written = io.BytesIO()
    solving.write_arrays(written, {"x": np.arange(3.0), "bound": np.array([-np.inf])})
    found = solving.read_arrays(io.BytesIO(written.getvalue()))
    assert found["x"].tolist() == [0, 1, 2]
    assert found["bound"].tolist() == [-np.inf]


def test_an_incomplete_answer_is_no_answer():
    written = io.BytesIO()
    solving.write_arrays(written, {"x": np.zeros(30)})
    assert solving.read_arrays(io.BytesIO(written.getvalue()[:100])) is None


@pytest.mark.parametrize("barrier", [False, True])
def test_without_a_solver_the_plan_is_at_least_as_good_as_the_greedy_one(monkeypatch, barrier):
    footprints = Footprints(PROFILE)
    preset_options = PresetOptions(prefetch=1, reduce_slots=1, barrier=barrier)
    low, high = (
        footprints.peak(preset_plan(n, PROFILE.shapes, preset_options)) for n in ("zero3", "zero2")
    )
    monkeypatch.setattr(Solver, "solve", lambda *_, **__: None)
    planned = make_plan(PROFILE, (low + high) // 2, barrier=barrier)
    check(planned.plan)
    assert footprints.peak(planned.plan) == planned.peak_bytes <= planned.memory_limit
    assert planned.step_s == time_plan(planned.plan, PROFILE).step_s
    assert planned.step_s <= planned.greedy_s < float("inf")
    assert planned.bound_s == PROFILE.compute_s
    assert set(planned.duals) == {0.0}
    assert planned.how not in ("fractions", "whole")
