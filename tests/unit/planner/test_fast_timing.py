"""FastTiming, for links with one lane, agrees with ExactTiming."""

import random

import pytest

from benchmarks.memory_limits import drawn_profile
from stretto.planner.check import check
from stretto.planner.exact_timing import ExactTiming
from stretto.planner.plan import MessageKind
from stretto.planner.presets import UnitShape, preset_plan, random_plan
from stretto.planner.profile import Link, Profile, UnitCost
from stretto.planner.timing import FastTiming, time_plan
from tests.unit.planner.examples import put_last

CYCLES = 4
TWO = (UnitShape("a", 1000), UnitShape("b", 2000))
"""Forward takes 1 s and 2 s, backward twice as long. At 2,000 bytes a second on two ranks, a
message of a takes 1 s, one of b 2 s."""


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


def flat(intervals):
    return [moment for interval in intervals for moment in interval]


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_both_simulations_agree_on_any_plan_cycle_by_cycle(first):
    for seed in range(first, first + 50):
        plan, profile = drawn(seed)
        fast, exact = FastTiming(plan, profile), ExactTiming(plan, profile)
        for _ in range(CYCLES):
            one, other = fast.run_cycle(), exact.run_cycle()
            assert one.step_s == pytest.approx(other.step_s, rel=1e-9), seed
            assert flat(one.slots) == pytest.approx(flat(other.slots), abs=1e-9), seed


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_both_simulations_agree_on_every_message_that_ends_in_the_cycle(first):
    compared = 0
    for seed in range(first, first + 50):
        plan, profile = drawn(seed)
        fast, exact = FastTiming(plan, profile), ExactTiming(plan, profile)
        for _ in range(CYCLES):
            one, other = fast.run_cycle(), exact.run_cycle()
        pairs = zip(one.messages, other.messages, strict=True)
        over = [pair for pair in pairs if pair[0].end_s < one.step_s * (1 - 1e-9)]
        for fast_interval, exact_interval in over:
            assert fast_interval == pytest.approx(exact_interval, abs=1e-9), seed
        compared += len(over)
    assert compared > 500


@pytest.mark.parametrize("timing", [FastTiming, ExactTiming])
def test_computation_beside_a_message_is_slower_by_hand(timing):
    # Backward of b 0-4. During its reduction, 4-6, 4/3 s of a's backward are done, the other 2/3
    # after it, to 20/3. Reduction of a to 23/3, its unshard to 26/3, that of b to 32/3. During it,
    # forward of a takes 3/2, to 61/6; forward of b waits for it, and runs to 38/3.
    run = timing(preset_plan("dear", TWO), two_profile(2000.0, slowdown=1.5))
    for _ in range(CYCLES):
        cycle = run.run_cycle()
    assert cycle.step_s == pytest.approx(38 / 3)
    assert flat(cycle.slots) == pytest.approx(
        [0, 4, 4, 20 / 3, 20 / 3, 20 / 3, 26 / 3, 61 / 6, 32 / 3, 38 / 3]
    )
    assert flat(cycle.messages) == pytest.approx(
        [4, 6, 20 / 3, 23 / 3, 23 / 3, 26 / 3, 26 / 3, 32 / 3]
    )


@pytest.mark.parametrize("timing", [FastTiming, ExactTiming])
def test_a_slot_that_is_slower_all_through_by_hand(timing):
    # At half the rate, the reduction of b, 4-8, lasts all through the backward of a: 2 s become 4.
    run = timing(preset_plan("dear", TWO), two_profile(1000.0, slowdown=2.0))
    for _ in range(CYCLES):
        cycle = run.run_cycle()
    assert flat(cycle.slots) == pytest.approx([0, 4, 4, 8, 8, 8, 12, 14, 16, 18])


@pytest.mark.parametrize("timing", [FastTiming, ExactTiming])
def test_a_slot_waits_for_an_unshard_queued_behind_another_units(timing):
    # Reductions 4-8 and 8-10. Then b, which is needed last, is unsharded 10-14, and a 14-16. The
    # forward of a starts at 16; its unshard has not even started when it is entered, at 6.
    plan = put_last(preset_plan("dear", TWO), MessageKind.UNSHARD, 0)
    check(plan)
    run = timing(plan, two_profile(1000.0))
    for _ in range(CYCLES):
        cycle = run.run_cycle()
    assert flat(cycle.slots) == pytest.approx([0, 4, 4, 6, 6, 6, 16, 17, 17, 19])
    assert cycle.step_s == pytest.approx(19)


def test_a_slot_waits_for_queued_messages_on_several_lanes_too():
    # Reduction of b 4-10, of a 6-10, sharing the link. Then both unshards share it: that of a
    # 10-14, that of b alone from then on, to 16.
    plan = put_last(preset_plan("dear", TWO), MessageKind.UNSHARD, 0)
    timed = time_plan(plan, two_profile(1000.0, lanes=2))
    assert flat(timed.slots) == pytest.approx([0, 4, 4, 6, 6, 6, 14, 15, 16, 18])


def test_time_plan_agrees_with_the_exact_simulation():
    for seed in range(30):
        plan, profile = drawn(seed)
        timing = ExactTiming(plan, profile)
        steps_s = [timing.run_cycle().step_s for _ in range(64)]
        assert time_plan(plan, profile).step_s == pytest.approx(steps_s[-1], rel=1e-6), seed
