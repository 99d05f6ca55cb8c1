"""The references for the planner's quality agree: solver, enumeration and simulation."""

from itertools import pairwise

import pytest

from stretto.planner.check import check
from stretto.planner.memory import Footprints
from stretto.planner.presets import PLAN_PRESETS, PresetOptions, preset_plan
from stretto.planner.timing import time_plan
from tests.exact.enumerate import best_plan
from tests.exact.instances import QUANTUM_S, draw_instance, draw_plan, frugal_plan
from tests.exact.problem import solve, solver_python
from tests.exact.repeating import steady_quanta

needs_solver = pytest.mark.skipif(
    solver_python() is None, reason="no interpreter here has OR-Tools (the extra exact)"
)
FEW = [(1, 0), (1, 2), (1, 7), (2, 0), (2, 2), (2, 5), (2, 9), (2, 17), (2, 19)]
MORE = [(3, 0), (3, 6), (3, 7), (3, 8)]
"""(units, seed). Other instances of three units take up to a minute to enumerate."""


@needs_solver
def test_enumeration_and_solver_find_the_same_optimum():
    instances = [draw_instance(seed, units) for units, seed in FEW + MORE]
    for instance, exact in zip(instances, solve(instances), strict=True):
        best = best_plan(instance)
        timed_s = time_plan(best, instance.profile).step_s
        assert exact.proven
        assert exact.step_s == pytest.approx(timed_s, rel=1e-9)
        assert Footprints(instance.profile).peak(best) <= instance.memory_limit


@needs_solver
def test_no_plan_that_fits_is_faster_than_the_optimum():
    instances = [draw_instance(seed) for seed in (0, 3, 7, 10, 12, 16)]
    for instance, exact in zip(instances, solve(instances), strict=True):
        assert exact.proven
        profile, footprints = instance.profile, Footprints(instance.profile)
        preset_options = PresetOptions(barrier=instance.barrier)
        plans = [preset_plan(name, profile.shapes, preset_options) for name in PLAN_PRESETS]
        plans += [draw_plan(instance, seed) for seed in range(200)]
        plans_that_fit = [plan for plan in plans if footprints.peak(plan) <= instance.memory_limit]
        assert plans_that_fit
        for plan in plans_that_fit:
            assert steady_quanta(plan, profile) * QUANTUM_S >= exact.step_s * (1 - 1e-9)


@needs_solver
@pytest.mark.parametrize("seed", [0, 3, 12])
def test_more_memory_is_never_slower(seed):
    drawn = draw_instance(seed)
    memory_limits = [round(drawn.memory_limit * share) for share in (1.0, 1.1, 1.3, 2.0)]
    solved = solve([drawn._replace(memory_limit=memory_limit) for memory_limit in memory_limits])
    steps_s = [exact.step_s for exact in solved]
    assert all(exact.proven for exact in solved)
    assert all(more <= less + 1e-9 for less, more in pairwise(steps_s))


@needs_solver
def test_the_minimum_memory_is_feasible_and_a_quarter_is_not():
    drawn = draw_instance(0, 3)
    least = Footprints(drawn.profile).peak(frugal_plan(drawn.profile, barrier=drawn.barrier))
    (exact,) = solve([drawn._replace(memory_limit=least)])
    assert exact.proven
    with pytest.raises(AssertionError, match="INFEASIBLE"):
        solve([drawn._replace(memory_limit=least // 4)])


@pytest.mark.parametrize("seed", range(40))
def test_an_instance_has_the_promised_properties(seed):
    instance = draw_instance(seed)
    assert instance == draw_instance(seed)
    profile, footprints = instance.profile, Footprints(instance.profile)
    dear = preset_plan("dear", profile.shapes, PresetOptions(barrier=instance.barrier))
    frugal = frugal_plan(profile, barrier=instance.barrier)
    check(frugal)
    least, most = footprints.peak(frugal), footprints.peak(dear)
    assert least <= instance.memory_limit <= max(least, most)
    zero2 = preset_plan("zero2", profile.shapes)
    assert 0.25 <= profile.link_s(zero2) / profile.compute_s <= 2.2


def test_simulation_and_graph_agree_on_any_plan():
    for seed in range(200):
        instance = draw_instance(seed)
        for drawn in range(5):
            plan = draw_plan(instance, drawn)
            check(plan)
            taken_s = steady_quanta(plan, instance.profile) * QUANTUM_S
            assert time_plan(plan, instance.profile).step_s == pytest.approx(taken_s), (seed, drawn)
