"""A budget split by hand: what each share gives; planning jointly is as good as the best."""

import itertools

import pytest

from benchmarks.profiles import profiles
from stretto.plan.check import check
from stretto.plan.fitting import tight_plan
from stretto.plan.footprint import Footprints
from stretto.plan.handsplit import even_shares, random_candidates, split_curve
from stretto.plan.options import Allowed, Choice, unit_of
from stretto.plan.planner import make_plan
from stretto.plan.presets import Wish, named_plan
from stretto.plan.profile import Link, Profile, UnitCost
from stretto.plan.timing import time_plan
from stretto.plan.value import Sharding

BARRIER = Allowed(barrier=True)
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
    """Return the mean of what zero3 and zero2 need with a barrier."""
    footprints, shapes = Footprints(profile), profile.shapes
    low = footprints.peak(named_plan("zero3", shapes, Wish(prefetch=1, pending=1, barrier=True)))
    high = footprints.peak(named_plan("zero2", shapes, Wish(prefetch=1, barrier=True)))
    return (low + high) // 2


def every_choice(profile, share, allowed):
    """Yield what the link carries for every choice of shardings that fits into ``share``."""
    footprints = Footprints(profile)
    for kinds in itertools.product(Sharding, repeat=len(profile.units)):
        units = [unit_of(profile, i, Choice(kind)) for i, kind in enumerate(kinds)]
        plan = tight_plan(units, barrier=allowed.barrier, whole_layers=False)
        if footprints.peak(plan) <= share:
            yield profile.channel_s(plan)


@pytest.mark.parametrize("allowed", [Allowed(blocks=False), Allowed(blocks=False, barrier=True)])
def test_no_choice_that_fits_into_the_share_sends_less(allowed):
    shares = even_shares(SMALL, 300_000, 5, allowed)
    points = split_curve(SMALL, 300_000, shares, allowed)
    assert [point.share_bytes for point in points] == shares
    for point in points:
        least_s = min(every_choice(SMALL, point.share_bytes, allowed))
        assert SMALL.channel_s(point.plan) == pytest.approx(least_s, rel=1e-3)


@pytest.mark.parametrize("allowed", [Allowed(), BARRIER], ids=["free", "barrier"])
def test_every_plan_can_be_carried_out_within_the_budget(allowed):
    budget, footprints = 180_000, Footprints(SMALL)
    points = split_curve(SMALL, budget, even_shares(SMALL, budget, 4, allowed), allowed)
    drawn = random_candidates(SMALL, budget, 30, 7, allowed)
    assert len(points) == 4
    assert len(drawn) == 30
    for one in (*points, *drawn):
        check(one.plan)
        assert one.plan.barrier == allowed.barrier
        assert footprints.peak(one.plan) <= budget
        assert time_plan(one.plan, SMALL).step_s == one.step_s


def test_shares_go_from_the_least_that_works_to_the_whole_budget():
    shares = even_shares(SMALL, 200_000, 3)
    assert shares[-1] == 200_000
    assert shares == sorted(shares)
    below = split_curve(SMALL, 200_000, [shares[0] - 1, shares[0]])
    assert [point.share_bytes for point in below] == [shares[0]]


def test_a_larger_share_never_sends_more():
    profile = profiles()["vgg16_10"]
    budget = middle_of(profile)
    allowed = Allowed(blocks=False)
    points = split_curve(profile, budget, even_shares(profile, budget, 5, allowed), allowed)
    sent_s = [profile.channel_s(point.plan) for point in points]
    # Latencies are the little that preferring less memory may cost.
    assert all(after <= before * 1.001 for before, after in itertools.pairwise(sent_s))
    assert sent_s[-1] < 0.98 * sent_s[0]


def test_random_plans_are_those_of_their_seed_and_differ():
    once, again = (random_candidates(SMALL, 180_000, 12, 3) for _ in range(2))
    assert once == again
    assert once != random_candidates(SMALL, 180_000, 12, 4)
    assert len({one.plan.digest() for one in once}) == 12


def test_a_budget_that_is_too_small_has_no_plans():
    assert random_candidates(SMALL, 1000, 3, 0) == []
    assert split_curve(SMALL, 1000, [500, 1000]) == []


@pytest.mark.parametrize("name", ["gpt_80", "vgg16_10"])
def test_planning_both_at_once_is_as_good_as_the_best_share_and_any_random_plan(name):
    profile = profiles()[name]
    budget = middle_of(profile)
    planned = make_plan(profile, budget)
    points = split_curve(profile, budget, even_shares(profile, budget, 5))
    assert planned.step_s <= min(point.step_s for point in points) * (1 + 1e-9)
    drawn = random_candidates(profile, budget, 20, 0)
    assert planned.step_s <= min(one.step_s for one in drawn)
