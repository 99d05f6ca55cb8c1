"""The planner's plans are close to the optimum, and its bound is a lower bound."""

import statistics

import pytest

from stretto.planner.memory import Footprints
from stretto.planner.planner import make_plan
from stretto.planner.presets import PresetOptions, add_barrier, preset_plan, random_plan
from stretto.planner.timing import time_plan
from tests.exact.instances import draw_instance
from tests.exact.problem import solve, solver_python

pytestmark = pytest.mark.usefixtures("kept_solvers")

SEEDS = (0, 3, 7, 10, 12, 16, 24, 47, 52, 62)
"""Instances of 2 to 6 units, with a barrier and without, that a solver proves in two seconds."""
MEAN, WORST = 0.01, 0.05


@pytest.mark.skipif(
    solver_python() is None, reason="no interpreter here has OR-Tools (the extra exact)"
)
@pytest.mark.timeout(400)
def test_plans_are_near_the_best_and_the_bound_is_not_above_it():
    instances = [draw_instance(seed) for seed in SEEDS]
    gaps = {}
    for seed, instance, exact in zip(SEEDS, instances, solve(instances), strict=True):
        planned = make_plan(instance.profile, instance.memory_limit, barrier=instance.barrier)
        assert exact.proven, seed
        assert planned.peak_bytes <= instance.memory_limit, seed
        assert planned.bound_s <= exact.step_s * (1 + 1e-9), seed
        # Negative if the plan splits units into blocks: the exact optimum does not.
        gaps[seed] = planned.step_s / exact.step_s - 1
    assert max(gaps.values()) <= WORST, gaps
    assert statistics.fmean(gaps.values()) <= MEAN, gaps


@pytest.mark.parametrize("seed", [0, 3, 10])
def test_no_plan_that_fits_is_faster_than_the_bound(seed):
    drawn = draw_instance(seed)
    profile, footprints = drawn.profile, Footprints(drawn.profile)
    # Some of the random plans fit into this much memory.
    resident = preset_plan("dear", profile.shapes, PresetOptions(barrier=drawn.barrier))
    memory_limit = footprints.peak(resident)
    bound_s = make_plan(profile, memory_limit, barrier=drawn.barrier).bound_s
    plans = [_random_plan(profile, number, drawn.barrier) for number in range(600)]
    plans_that_fit = [plan for plan in plans if footprints.peak(plan) <= memory_limit]
    assert len(plans_that_fit) >= 50
    for plan in plans_that_fit[:50]:
        assert time_plan(plan, profile).step_s >= bound_s * (1 - 1e-9)


def _random_plan(profile, seed, barrier):
    """Return a random plan in blocks without recomputation, like the planner's plans."""
    plan = random_plan(profile.shapes, seed)
    units = tuple(unit.model_copy(update={"checkpoint": False}) for unit in plan.units)
    plan = plan.replace(units=units)
    return add_barrier(plan) if barrier else plan.replace(barrier=False)
