"""Two clocks, one truth: the quick one of one lane says what the one of any number says."""

import random

import pytest

from benchmarks.budgets import drawn_profile
from stretto.plan.check import check
from stretto.plan.clock import Clock
from stretto.plan.pace import Pace
from stretto.plan.presets import Shape, named_plan, random_plan
from stretto.plan.profile import Link, Profile, UnitCost
from stretto.plan.timing import time_plan
from stretto.plan.value import What
from tests.unit.plan.made_up import put_last

CYCLES = 4
TWO = (Shape("a", 1000), Shape("b", 2000))
"""Forward takes 1 s and 2 s, backward twice as long; at 2,000 bytes a second on two ranks a message
of a takes 1 s, one of b 2 s."""


def drawn(seed):
    """Return a random plan on a random link of one lane."""
    draw = random.Random(seed)
    profile = drawn_profile(draw)
    changes = {"link": profile.link.model_copy(update={"lanes": 1})}
    changes["slowdown"] = draw.choice([1.0, draw.uniform(1.0, 2.0)])
    changes["update_s"] = draw.choice([0.0, 10 ** draw.uniform(-4, -2)])
    profile = profile.model_copy(update=changes)
    plan = random_plan(profile.shapes, seed, whole_layers=draw.random() < 0.3)
    return plan, profile


def two_profile(rate, slowdown=1.0, lanes=1):
    units = [
        UnitCost(name=s.name, numel=s.numel, forward_s=s.numel / 1000, backward_s=s.numel / 500)
        for s in TWO
    ]
    link = Link(ranks=2, bytes_per_s=rate, lanes=lanes)
    return Profile(units=tuple(units), link=link, slowdown=slowdown)


def flat(stretches):
    return [moment for stretch in stretches for moment in stretch]


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_both_clocks_tell_the_same_of_any_plan_cycle_by_cycle(first):
    for seed in range(first, first + 50):
        plan, profile = drawn(seed)
        quick, thorough = Pace(plan, profile), Clock(plan, profile)
        for _ in range(CYCLES):
            one, other = quick.run_cycle(), thorough.run_cycle()
            assert one.step_s == pytest.approx(other.step_s, rel=1e-9), seed
            assert flat(one.slots) == pytest.approx(flat(other.slots), abs=1e-9), seed


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_both_clocks_carry_every_message_that_is_over_at_the_same_time(first):
    compared = 0
    for seed in range(first, first + 50):
        plan, profile = drawn(seed)
        quick, thorough = Pace(plan, profile), Clock(plan, profile)
        for _ in range(CYCLES):
            one, other = quick.run_cycle(), thorough.run_cycle()
        pairs = zip(one.messages, other.messages, strict=True)
        over = [pair for pair in pairs if pair[0].end_s < one.step_s * (1 - 1e-9)]
        for mine, theirs in over:
            assert mine == pytest.approx(theirs, abs=1e-9), seed
        compared += len(over)
    assert compared > 500


@pytest.mark.parametrize("clock", [Pace, Clock])
def test_computation_beside_a_message_is_slower_by_hand(clock):
    # Backward of b 0-4. Beside its reduction, 4-6, 4/3 s of a's backward are done, the other 2/3
    # after it, to 20/3. Reduction of a to 23/3, its gather to 26/3, that of b to 32/3. Beside that
    # forward of a takes 3/2, to 61/6; forward of b waits for it, and runs to 38/3.
    run = clock(named_plan("dear", TWO), two_profile(2000.0, slowdown=1.5))
    for _ in range(CYCLES):
        cycle = run.run_cycle()
    assert cycle.step_s == pytest.approx(38 / 3)
    assert flat(cycle.slots) == pytest.approx(
        [0, 4, 4, 20 / 3, 20 / 3, 20 / 3, 26 / 3, 61 / 6, 32 / 3, 38 / 3]
    )
    assert flat(cycle.messages) == pytest.approx(
        [4, 6, 20 / 3, 23 / 3, 23 / 3, 26 / 3, 26 / 3, 32 / 3]
    )


@pytest.mark.parametrize("clock", [Pace, Clock])
def test_a_slot_that_is_slower_from_its_beginning_to_its_end_by_hand(clock):
    # At half the rate the reduction of b, 4-8, is there all through the backward of a: 2 s are 4.
    run = clock(named_plan("dear", TWO), two_profile(1000.0, slowdown=2.0))
    for _ in range(CYCLES):
        cycle = run.run_cycle()
    assert flat(cycle.slots) == pytest.approx([0, 4, 4, 8, 8, 8, 12, 14, 16, 18])


@pytest.mark.parametrize("clock", [Pace, Clock])
def test_a_slot_waits_for_a_gather_that_stands_behind_another_units(clock):
    # Reductions 4-8 and 8-10. Then b, which is needed last, is gathered 10-14, and a 14-16: the
    # forward of a begins at 16, though its gather has not even begun when it is entered, at 6.
    plan = put_last(named_plan("dear", TWO), What.GATHER, 0)
    check(plan)
    run = clock(plan, two_profile(1000.0))
    for _ in range(CYCLES):
        cycle = run.run_cycle()
    assert flat(cycle.slots) == pytest.approx([0, 4, 4, 6, 6, 6, 16, 17, 17, 19])
    assert cycle.step_s == pytest.approx(19)


def test_a_slot_waits_for_what_stands_behind_others_on_lanes_of_their_own_too():
    # Reduction of b 4-10, of a 6-10, sharing the link; then both gathers share it: a's 10-14, b's
    # alone from then on, to 16.
    plan = put_last(named_plan("dear", TWO), What.GATHER, 0)
    timed = time_plan(plan, two_profile(1000.0, lanes=2))
    assert flat(timed.slots) == pytest.approx([0, 4, 4, 6, 6, 6, 14, 15, 16, 18])


def test_time_plan_takes_either_clock_for_its_link():
    for seed in range(30):
        plan, profile = drawn(seed)
        clock = Clock(plan, profile)
        steps_s = [clock.run_cycle().step_s for _ in range(64)]
        assert time_plan(plan, profile).step_s == pytest.approx(steps_s[-1], rel=1e-6), seed
