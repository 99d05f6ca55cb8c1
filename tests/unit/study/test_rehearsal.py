"""A profile that is made to tell what steps took: found again, or left where steps were quicker."""

import pytest

from stretto.plan.building import with_barrier
from stretto.plan.presets import Wish, named_plan, random_plan
from stretto.plan.profile import Link, Profile, UnitCost
from stretto.plan.timing import time_plan
from stretto.study.rehearsal import Rehearsed, Step, corrected, fitted

SIZES = (2_000_000, 500_000, 3_000_000, 1_000_000)
PROFILE = Profile(
    units=tuple(
        UnitCost(name=f"u{i}", numel=n, forward_s=n * 5e-9, backward_s=n * 1e-8)
        for i, n in enumerate(SIZES)
    ),
    link=Link(ranks=4, latency_s=1e-4, bytes_per_s=4e8),
)
WHOLE = named_plan("zero2", PROFILE.shapes, Wish(barrier=True))
CUT = named_plan("zero2", PROFILE.shapes, Wish(block=max(SIZES) // 4, barrier=True))
AGAIN = named_plan("zero3", PROFILE.shapes, Wish(2, 1, barrier=True))
APART = named_plan("zero2", PROFILE.shapes)
FOR_ALL = named_plan("ddp", PROFILE.shapes)


def seen_on(profile):
    """Return what a machine would tell that is as ``profile`` says."""
    plans = (WHOLE, CUT, AGAIN, APART, FOR_ALL)
    steps = [Step(plan, time_plan(plan, profile).step_s) for plan in plans]
    return Rehearsed(profile.compute_s, *steps)


def steps_of(seen):
    return seen.whole, seen.cut, seen.again, seen.apart, seen.for_all


def with_link(slower, latency_s):
    rate = PROFILE.link.bytes_per_s / slower
    link = PROFILE.link.model_copy(update={"bytes_per_s": rate, "latency_s": latency_s})
    return PROFILE.model_copy(update={"link": link})


def stretched(profile, longer):
    units = [
        unit.model_copy(
            update={"forward_s": unit.forward_s * longer, "backward_s": unit.backward_s * longer}
        )
        for unit in profile.units
    ]
    return Profile(units=tuple(units), link=profile.link)


@pytest.mark.parametrize(("slower", "latency_s"), [(1.5, 2e-3), (3.0, 5e-4), (1.0, 4e-3)])
def test_a_slower_link_and_a_longer_latency_are_found_again(slower, latency_s):
    true = with_link(slower, latency_s)
    link = fitted(PROFILE, seen_on(true)).link
    assert link.bytes_per_s == pytest.approx(true.link.bytes_per_s, rel=0.03)
    assert link.latency_s == pytest.approx(latency_s, rel=0.03)


def test_units_that_take_longer_in_a_run_are_stretched_alike():
    true = stretched(with_link(1.5, 2e-3), 1.3)
    found = fitted(PROFILE, seen_on(true))
    assert found.link.bytes_per_s == pytest.approx(true.link.bytes_per_s, rel=0.03)
    for mine, theirs in zip(found.units, true.units, strict=True):
        assert mine.forward_s == pytest.approx(theirs.forward_s)
        assert mine.backward_s == pytest.approx(theirs.backward_s)


def test_a_profile_that_was_stretched_tells_its_new_sum():
    seen = seen_on(stretched(PROFILE, 1.3))
    assert fitted(PROFILE, seen).compute_s == pytest.approx(1.3 * PROFILE.compute_s)


def test_the_clock_says_of_what_was_found_what_was_seen():
    seen = seen_on(stretched(with_link(2.2, 1e-3), 1.1))
    found = seen_on(fitted(PROFILE, seen))
    for mine, theirs in zip(steps_of(found), steps_of(seen), strict=True):
        assert mine.step_s == pytest.approx(theirs.step_s, rel=0.003)


@pytest.mark.parametrize("ratio", [0.6, 1.0, 1.7])
def test_what_a_gather_takes_is_found_again(ratio):
    true = with_link(1.5, 1e-3)
    link = true.link.model_copy(update={"gather_ratio": ratio})
    true = true.model_copy(update={"link": link})
    found = fitted(PROFILE, seen_on(true)).link
    assert found.gather_ratio == pytest.approx(ratio, rel=0.03)
    assert found.bytes_per_s == pytest.approx(true.link.bytes_per_s, rel=0.05)


@pytest.mark.parametrize("ratio", [0.7, 1.0, 1.4])
def test_what_a_sum_for_all_takes_is_found_again(ratio):
    true = with_link(1.5, 1e-3)
    link = true.link.model_copy(update={"sum_ratio": ratio})
    found = fitted(PROFILE, seen_on(true.model_copy(update={"link": link}))).link
    assert found.sum_ratio == pytest.approx(ratio, rel=0.03)


def test_what_a_plan_of_its_own_took_longer_counts_for_all_that_stray():
    drawn = (random_plan(PROFILE.shapes, seed) for seed in range(50))
    planned = next(plan for plan in drawn if plan.strays and not plan.barrier)
    step_s = time_plan(planned, PROFILE).step_s
    found = corrected(PROFILE, [Step(planned, 1.1 * step_s)])
    assert found.straying == pytest.approx(1.1)
    assert time_plan(planned, found).step_s == pytest.approx(1.1 * step_s)
    assert time_plan(APART, found).step_s == time_plan(APART, PROFILE).step_s
    assert corrected(PROFILE, [Step(planned, 0.9 * step_s)]).straying == 1.0
    assert corrected(PROFILE, [Step(APART, 9.0)]) == PROFILE
    met = with_barrier(planned)
    met_s = time_plan(met, PROFILE).step_s
    found = corrected(PROFILE, [Step(planned, step_s), Step(met, 1.2 * met_s)])
    assert (found.straying, found.straying_met) == (1.0, pytest.approx(1.2))


@pytest.mark.parametrize("parting", [0.9, 1.0, 1.2])
def test_what_it_costs_that_ranks_do_not_wait_is_found_again(parting):
    true = with_link(1.5, 1e-3).model_copy(update={"parting": parting})
    assert fitted(PROFILE, seen_on(true)).parting == pytest.approx(parting, rel=0.01)


def test_what_is_quicker_than_told_is_left():
    quick = stretched(with_link(0.5, 1e-5), 0.7)
    found = fitted(PROFILE, seen_on(quick))
    assert found.units == PROFILE.units
    assert found.link.bytes_per_s == pytest.approx(PROFILE.link.bytes_per_s)
    assert found.link.latency_s == pytest.approx(PROFILE.link.latency_s)


def test_nothing_but_the_seconds_of_units_and_the_link_changes():
    found = fitted(PROFILE, seen_on(stretched(with_link(1.5, 2e-3), 1.2)))
    link = {"bytes_per_s": PROFILE.link.bytes_per_s, "latency_s": PROFILE.link.latency_s}
    link |= {"gather_ratio": 1.0, "sum_ratio": 1.0}
    changes = {"units": PROFILE.units, "link": found.link.model_copy(update=link)}
    changes |= {"parting": 1.0, "straying": 1.0}
    assert found.model_copy(update=changes) == PROFILE
