"""What tests of all folders share."""

import pytest

from stretto.planner.solver import keep_solver_processes


@pytest.fixture(scope="module")
def kept_solvers():
    """Plan with the same solver processes in a whole module; each takes half a second to start."""
    with keep_solver_processes():
        yield
