"""Memory split by hand: the plan of each share; the planner is as fast as the best share."""

import itertools

import pytest

from benchmarks.profiles import profiles
from stretto.planner.check import check
from stretto.planner.heuristic_split import even_shares, random_plans_within, split_curve
from stretto.planner.memory import Footprints
from stretto.planner.message_windows import just_in_time_plan
from stretto.planner.plan import Sharding
from stretto.planner.planner import make_plan
from stretto.planner.presets import PresetOptions, preset_plan
from stretto.planner.profile import Link, Profile, UnitCost
from stretto.planner.timing import time_plan
from stretto.planner.unit_choices import PlanConstraints, UnitChoice, make_unit

pytestmark = pytest.mark.usefixtures("kept_solvers")

BARRIER = PlanConstraints(barrier=True)
SMALL = Profile(
    units=tuple(
        UnitCost(name=f"u{i}", numel=n, forward_s=1.0, backward_s=2.0, activation_bytes=a)
        for i, (n, a) in enumerate([(4000, 900), (64, 5000), (9000, 10), (700, 4000)])
    ),
    link=Link(ranks=4, bytes_per_s=1e4, latency_s=0.01),
    state_bytes=8,
    other_bytes=1000,
)


def middle_of(profile):
    """Return the mean of the memory of zero3 and of zero2, both with a barrier."""
    footprints, shapes = Footprints(profile), profile.shapes
    low = footprints.peak(
        preset_plan("zero3", shapes, PresetOptions(prefetch=1, reduce_slots=1, barrier=True))
    )
    high = footprints.peak(preset_plan("zero2", shapes, PresetOptions(prefetch=1, barrier=True)))
    return (low + high) // 2


def every_choice(profile, share, constraints):
    """Yield the link seconds of every choice of shardings that fits into ``share``."""
    footprints = Footprints(profile)
    for kinds in itertools.product(Sharding, repeat=len(profile.units)):
        units = [make_unit(profile, i, UnitChoice(kind)) for i, kind in enumerate(kinds)]
        plan = just_in_time_plan(units, barrier=constraints.barrier, whole_layers=False)
        if footprints.peak(plan) <= share:
            yield profile.link_s(plan)


@pytest.mark.parametrize(
    "constraints", [PlanConstraints(blocks=False), PlanConstraints(blocks=False, barrier=True)]
)
def test_no_choice_that_fits_into_the_share_sends_less(constraints):
    shares = even_shares(SMALL, 300_000, 5, constraints)
    points = split_curve(SMALL, 300_000, shares, constraints)
    assert [point.share_bytes for point in points] == shares
    for point in points:
        least_s = min(every_choice(SMALL, point.share_bytes, constraints))
        assert SMALL.link_s(point.plan) == pytest.approx(least_s, rel=1e-3)


@pytest.mark.parametrize("constraints", [PlanConstraints(), BARRIER], ids=["free", "barrier"])
def test_every_plan_is_valid_and_fits_into_the_memory_limit(constraints):
    memory_limit, footprints = 180_000, Footprints(SMALL)
    points = split_curve(
        SMALL, memory_limit, even_shares(SMALL, memory_limit, 4, constraints), constraints
    )
    drawn = random_plans_within(SMALL, memory_limit, 30, 7, constraints)
    assert len(points) == 4
    assert len(drawn) == 30
    for one in (*points, *drawn):
        check(one.plan)
        assert one.plan.barrier == constraints.barrier
        assert footprints.peak(one.plan) <= memory_limit
        assert time_plan(one.plan, SMALL).step_s == one.step_s


def test_shares_range_from_the_smallest_that_works_to_the_whole_limit():
    shares = even_shares(SMALL, 200_000, 3)
    assert shares[-1] == 200_000
    assert shares == sorted(shares)
    below = split_curve(SMALL, 200_000, [shares[0] - 1, shares[0]])
    assert [point.share_bytes for point in below] == [shares[0]]


def test_a_larger_share_never_sends_more():
    profile = profiles()["vgg16_10"]
    memory_limit = middle_of(profile)
    constraints = PlanConstraints(blocks=False)
    points = split_curve(
        profile, memory_limit, even_shares(profile, memory_limit, 5, constraints), constraints
    )
    sent_s = [profile.link_s(point.plan) for point in points]
    # The preference for less memory may cost a little: the latencies of a few messages.
    assert all(after <= before * 1.001 for before, after in itertools.pairwise(sent_s))
    assert sent_s[-1] < 0.98 * sent_s[0]


def test_random_plans_depend_only_on_the_seed_and_differ():
    once, again = (random_plans_within(SMALL, 180_000, 12, 3) for _ in range(2))
    assert once == again
    assert once != random_plans_within(SMALL, 180_000, 12, 4)
    assert len({one.plan.digest() for one in once}) == 12


def test_a_memory_limit_that_is_too_small_has_no_plans():
    assert random_plans_within(SMALL, 1000, 3, 0) == []
    assert split_curve(SMALL, 1000, [500, 1000]) == []


@pytest.mark.parametrize("name", ["gpt_80", "vgg16_10"])
def test_the_planner_is_as_fast_as_the_best_share_and_any_random_plan(name):
    profile = profiles()[name]
    memory_limit = middle_of(profile)
    planned = make_plan(profile, memory_limit)
    points = split_curve(profile, memory_limit, even_shares(profile, memory_limit, 5))
    assert planned.step_s <= min(point.step_s for point in points) * (1 + 1e-9)
    drawn = random_plans_within(profile, memory_limit, 20, 0)
    assert planned.step_s <= min(one.step_s for one in drawn)
