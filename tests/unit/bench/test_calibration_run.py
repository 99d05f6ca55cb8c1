"""Calibrating a profile: the parameters behind simulated step times are recovered."""

import pytest

from stretto.bench.calibration_run import (
    CalibrationSteps,
    TimedPlan,
    correct_generated_plans,
    fit_profile,
)
from stretto.planner.presets import PresetOptions, add_barrier, preset_plan, random_plan
from stretto.planner.profile import Link, Profile, UnitCost
from stretto.planner.timing import time_plan

pytestmark = pytest.mark.usefixtures("kept_solvers")

SIZES = (2_000_000, 500_000, 3_000_000, 1_000_000)
PROFILE = Profile(
    units=tuple(
        UnitCost(name=f"u{i}", numel=n, forward_s=n * 5e-9, backward_s=n * 1e-8)
        for i, n in enumerate(SIZES)
    ),
    link=Link(ranks=4, latency_s=1e-4, bytes_per_s=4e8),
)
ZERO2 = preset_plan("zero2", PROFILE.shapes, PresetOptions(barrier=True))
ZERO2_BLOCKS = preset_plan(
    "zero2", PROFILE.shapes, PresetOptions(block=max(SIZES) // 4, barrier=True)
)
ZERO3 = preset_plan("zero3", PROFILE.shapes, PresetOptions(2, 1, barrier=True))
ZERO2_NO_BARRIER = preset_plan("zero2", PROFILE.shapes)
DDP = preset_plan("ddp", PROFILE.shapes)


def times_on(profile):
    """Return the step times of a machine that behaves exactly as ``profile``."""
    plans = (ZERO2, ZERO2_BLOCKS, ZERO3, ZERO2_NO_BARRIER, DDP)
    steps = [TimedPlan(plan, time_plan(plan, profile).step_s) for plan in plans]
    return CalibrationSteps(profile.compute_s, *steps)


def steps_of(times):
    return times.zero2, times.zero2_blocks, times.zero3, times.zero2_no_barrier, times.ddp


def with_link(slower, latency_s):
    rate = PROFILE.link.bytes_per_s / slower
    link = PROFILE.link.model_copy(update={"bytes_per_s": rate, "latency_s": latency_s})
    return PROFILE.model_copy(update={"link": link})


def with_slower_units(profile, factor):
    units = [
        unit.model_copy(
            update={"forward_s": unit.forward_s * factor, "backward_s": unit.backward_s * factor}
        )
        for unit in profile.units
    ]
    return Profile(units=tuple(units), link=profile.link)


@pytest.mark.parametrize(("slower", "latency_s"), [(1.5, 2e-3), (3.0, 5e-4), (1.0, 4e-3)])
def test_a_slower_link_and_a_longer_latency_are_recovered(slower, latency_s):
    true = with_link(slower, latency_s)
    link = fit_profile(PROFILE, times_on(true)).link
    assert link.bytes_per_s == pytest.approx(true.link.bytes_per_s, rel=0.03)
    assert link.latency_s == pytest.approx(latency_s, rel=0.03)


def test_slower_units_are_scaled_by_one_factor():
    true = with_slower_units(with_link(1.5, 2e-3), 1.3)
    found = fit_profile(PROFILE, times_on(true))
    assert found.link.bytes_per_s == pytest.approx(true.link.bytes_per_s, rel=0.03)
    for fitted, actual in zip(found.units, true.units, strict=True):
        assert fitted.forward_s == pytest.approx(actual.forward_s)
        assert fitted.backward_s == pytest.approx(actual.backward_s)


def test_the_compute_time_of_a_scaled_profile_is_recovered():
    times = times_on(with_slower_units(PROFILE, 1.3))
    assert fit_profile(PROFILE, times).compute_s == pytest.approx(1.3 * PROFILE.compute_s)


def test_the_fitted_profile_predicts_the_measured_steps():
    times = times_on(with_slower_units(with_link(2.2, 1e-3), 1.1))
    found = times_on(fit_profile(PROFILE, times))
    for predicted, measured in zip(steps_of(found), steps_of(times), strict=True):
        assert predicted.step_s == pytest.approx(measured.step_s, rel=0.003)


@pytest.mark.parametrize("ratio", [0.6, 1.0, 1.7])
def test_the_time_of_a_gather_is_recovered(ratio):
    true = with_link(1.5, 1e-3)
    link = true.link.model_copy(update={"gather_ratio": ratio})
    true = true.model_copy(update={"link": link})
    found = fit_profile(PROFILE, times_on(true)).link
    assert found.gather_ratio == pytest.approx(ratio, rel=0.03)
    assert found.bytes_per_s == pytest.approx(true.link.bytes_per_s, rel=0.05)


@pytest.mark.parametrize("ratio", [0.7, 1.0, 1.4])
def test_the_time_of_an_all_reduce_is_recovered(ratio):
    true = with_link(1.5, 1e-3)
    link = true.link.model_copy(update={"sum_ratio": ratio})
    found = fit_profile(PROFILE, times_on(true.model_copy(update={"link": link}))).link
    assert found.sum_ratio == pytest.approx(ratio, rel=0.03)


def test_the_slowdown_of_a_timed_plan_applies_to_all_reordered_plans():
    candidates = (random_plan(PROFILE.shapes, seed) for seed in range(50))
    planned = next(plan for plan in candidates if plan.is_reordered and not plan.barrier)
    step_s = time_plan(planned, PROFILE).step_s
    found = correct_generated_plans(PROFILE, [TimedPlan(planned, 1.1 * step_s)])
    assert found.reordering_slowdown == pytest.approx(1.1)
    assert time_plan(planned, found).step_s == pytest.approx(1.1 * step_s)
    assert time_plan(ZERO2_NO_BARRIER, found).step_s == time_plan(ZERO2_NO_BARRIER, PROFILE).step_s
    assert (
        correct_generated_plans(PROFILE, [TimedPlan(planned, 0.9 * step_s)]).reordering_slowdown
        == 1.0
    )
    assert correct_generated_plans(PROFILE, [TimedPlan(ZERO2_NO_BARRIER, 9.0)]) == PROFILE
    with_barrier = add_barrier(planned)
    with_barrier_s = time_plan(with_barrier, PROFILE).step_s
    found = correct_generated_plans(
        PROFILE, [TimedPlan(planned, step_s), TimedPlan(with_barrier, 1.2 * with_barrier_s)]
    )
    assert (found.reordering_slowdown, found.reordering_slowdown_with_barrier) == (
        1.0,
        pytest.approx(1.2),
    )


@pytest.mark.parametrize("no_barrier_slowdown", [0.9, 1.0, 1.2])
def test_the_cost_of_a_missing_barrier_is_recovered(no_barrier_slowdown):
    true = with_link(1.5, 1e-3).model_copy(update={"no_barrier_slowdown": no_barrier_slowdown})
    assert fit_profile(PROFILE, times_on(true)).no_barrier_slowdown == pytest.approx(
        no_barrier_slowdown, rel=0.01
    )


def test_a_profile_is_not_made_faster():
    quick = with_slower_units(with_link(0.5, 1e-5), 0.7)
    found = fit_profile(PROFILE, times_on(quick))
    assert found.units == PROFILE.units
    assert found.link.bytes_per_s == pytest.approx(PROFILE.link.bytes_per_s)
    assert found.link.latency_s == pytest.approx(PROFILE.link.latency_s)


def test_only_the_seconds_of_units_and_the_link_change():
    found = fit_profile(PROFILE, times_on(with_slower_units(with_link(1.5, 2e-3), 1.2)))
    link = {"bytes_per_s": PROFILE.link.bytes_per_s, "latency_s": PROFILE.link.latency_s}
    link |= {"gather_ratio": 1.0, "sum_ratio": 1.0}
    changes = {"units": PROFILE.units, "link": found.link.model_copy(update=link)}
    changes |= {"no_barrier_slowdown": 1.0, "reordering_slowdown": 1.0}
    assert found.model_copy(update=changes) == PROFILE
