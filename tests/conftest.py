"""What tests of all folders share: solver processes, and the core that a test runs on."""

import os

import pytest

from stretto.planner.solver import keep_solver_processes

CORES = sorted(os.sched_getaffinity(0))
WORKER_INDEX = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
ALL_CORES_MARKERS = ("multi", "lab", "timed", "gpu")
"""Tests with these markers start processes or measure times, so they may use every core."""


@pytest.fixture(scope="module")
def kept_solvers():
    """Plan with the same solver processes in a whole module; each takes half a second to start."""
    with keep_solver_processes():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Keep a test whose ranks are threads on one core.

    Python runs one thread at a time. On two cores the threads hand it from core to core, and such
    tests take a third longer.
    """
    pinned = not any(map(item.get_closest_marker, ALL_CORES_MARKERS))
    os.sched_setaffinity(0, {CORES[WORKER_INDEX % len(CORES)]} if pinned else CORES)
    return (yield)
