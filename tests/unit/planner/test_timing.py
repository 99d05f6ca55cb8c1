"""The simulated step time of plans: computed by hand for two units, within bounds for any plan."""

import pytest

from benchmarks.profiles import FOLDER, profiles
from stretto.errors import ConfigError
from stretto.planner.plan import MessageKind
from stretto.planner.presets import (
    PLAN_PRESETS,
    PresetOptions,
    UnitShape,
    add_barrier,
    preset_plan,
    random_plan,
)
from stretto.planner.profile import Link, Profile, UnitCost, read_profile
from stretto.planner.timing import time_plan
from tests.unit.planner.examples import SHAPES

pytestmark = pytest.mark.usefixtures("kept_solvers")

TWO = (UnitShape("a", 1000), UnitShape("b", 2000))
"""On two ranks at 1,000 bytes a second, a message of a takes 2 s, one of b 4 s."""


def profile_of(shapes, rate=1000.0, **link):
    """Return a profile in which a thousand elements take 1 s forward and 2 s backward."""
    units = [
        UnitCost(name=s.name, numel=s.numel, forward_s=s.numel / 1000, backward_s=s.numel / 500)
        for s in shapes
    ]
    return Profile(units=tuple(units), link=Link(ranks=2, bytes_per_s=rate, **link))


def test_two_units_by_hand_with_parameters_that_stay():
    # Backward of b 0-4, of a 4-6. Reductions 4-8 and 8-10, unshards of a 10-12 and of b 12-16.
    # Forward of a 12-13, of b 16-18. Then the cycle repeats.
    timed = time_plan(preset_plan("dear", TWO), profile_of(TWO))
    assert timed.step_s == pytest.approx(18)
    assert [(m.start_s, m.end_s) for m in timed.messages] == [(4, 8), (8, 10), (10, 12), (12, 16)]
    assert [(s.start_s, s.end_s) for s in timed.slots] == [
        (0, 4),
        (4, 6),
        (6, 6),
        (12, 13),
        (16, 18),
    ]
    assert timed.waited_s == pytest.approx(9)


@pytest.mark.parametrize(("prefetch", "expected"), [(1, (0, 2)), (2, (16, 18))])
def test_two_units_by_hand_with_parameters_that_are_unsharded_twice(prefetch, expected):
    # b, the last unit, stays whole. a is unsharded again during the backward or forward of b.
    plan = preset_plan("zero3", TWO, PresetOptions(prefetch=prefetch))
    timed = time_plan(plan, profile_of(TWO))
    assert timed.step_s == pytest.approx(18)
    pairs = zip(plan.messages, timed.messages, strict=True)
    assert [
        when for message, when in pairs if message.what is MessageKind.UNSHARD_FOR_BACKWARD
    ] == [expected]


def test_all_reduces_take_twice_as_long_and_nothing_is_unsharded():
    # Reductions 4-12 and 12-16; forward of a waits for its reduction, forward of b need not.
    timed = time_plan(preset_plan("ddp", TWO), profile_of(TWO))
    assert timed.step_s == pytest.approx(16 + 1 + 2)


def test_all_gathers_may_take_longer_than_reduce_scatters():
    # As above, with unshards of a 10-13 and of b 13-19: forward of a 13-14, of b 19-21.
    timed = time_plan(preset_plan("dear", TWO), profile_of(TWO, gather_ratio=1.5))
    assert timed.step_s == pytest.approx(21)
    # An all-reduce is a reduce-scatter and an all-gather: reductions 4-14 and 14-19.
    assert time_plan(preset_plan("ddp", TWO), profile_of(TWO, gather_ratio=1.5)).step_s == (
        pytest.approx(19 + 1 + 2)
    )


@pytest.mark.parametrize("name", PLAN_PRESETS)
def test_without_a_barrier_everything_takes_longer_if_ranks_drift(name):
    plain = profile_of(TWO, latency_s=0.1)
    drifting = plain.model_copy(update={"no_barrier_slowdown": 1.25})
    free = preset_plan(name, TWO)
    assert time_plan(free, drifting).step_s == pytest.approx(1.25 * time_plan(free, plain).step_s)
    with_barrier = add_barrier(free)
    assert time_plan(with_barrier, drifting).step_s == pytest.approx(
        time_plan(with_barrier, plain).step_s
    )


def test_the_drift_factor_is_applied_once():
    drifting = profile_of(TWO, latency_s=0.1, hosts=1).model_copy(
        update={"no_barrier_slowdown": 1.25}
    )
    plan = preset_plan("dear", TWO)
    once = drifting.adjusted_for(plan)
    assert once.adjusted_for(plan) == once
    assert drifting.adjusted_for(add_barrier(plan)).units == drifting.units
    assert once.update_s == 1.25 * drifting.update_s
    assert once.link.all_ranks_s(1e3) == pytest.approx(1.25 * drifting.link.all_ranks_s(1e3))


def test_only_plans_that_leave_the_order_of_use_pay_for_it():
    three = (*TWO, UnitShape("c", 1000))
    plain = profile_of(three, latency_s=0.1)
    dear = plain.model_copy(update={"reordering_slowdown": 1.2})
    for name in PLAN_PRESETS:
        plan = preset_plan(name, three)
        assert not plan.is_reordered
        assert time_plan(plan, dear).step_s == time_plan(plan, plain).step_s
    first, second, *rest = preset_plan("dear", three).messages
    other = plan.replace(units=preset_plan("dear", three).units, messages=(second, first, *rest))
    assert other.is_reordered
    assert time_plan(other, dear).step_s == pytest.approx(1.2 * time_plan(other, plain).step_s)
    with_barrier = add_barrier(other)
    assert with_barrier.is_reordered
    assert time_plan(with_barrier, dear).step_s == time_plan(with_barrier, plain).step_s
    dear = dear.model_copy(update={"reordering_slowdown_with_barrier": 1.1})
    assert time_plan(with_barrier, dear).step_s == pytest.approx(
        1.1 * time_plan(with_barrier, plain).step_s
    )


def test_windows_are_tight_if_a_unit_is_unsharded_only_one_slot_ahead():
    three = (*TWO, UnitShape("c", 1000))
    assert preset_plan("zero2", three, PresetOptions(prefetch=1)).has_tight_windows
    assert not preset_plan("zero2", three, PresetOptions(prefetch=2)).has_tight_windows
    assert not preset_plan("dear", three).has_tight_windows
    assert not preset_plan("ddp", three).has_tight_windows
    assert not preset_plan("dear", TWO[:1]).has_tight_windows, "the first unit has no earlier slot"


def test_a_latency_is_paid_for_each_message():
    plan = preset_plan("dear", TWO)
    late = time_plan(plan, profile_of(TWO, latency_s=0.5))
    assert late.step_s == pytest.approx(18 + 4 * 0.5)


@pytest.mark.parametrize("name", PLAN_PRESETS)
def test_with_an_instant_link_only_computation_remains(name):
    profile = profile_of(SHAPES, rate=1e15)
    timed = time_plan(preset_plan(name, SHAPES), profile)
    assert timed.step_s == pytest.approx(profile.compute_s)
    assert timed.waited_s == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("rate", [100.0, 3000.0, 1e5])
def test_no_step_is_shorter_than_its_bounds_or_longer_than_their_sum(rate):
    profile = profile_of(SHAPES, rate, latency_s=0.001)
    for seed in range(60):
        plan = random_plan(SHAPES, seed)
        again_s = sum(
            cost.forward_s
            for unit, cost in zip(plan.units, profile.units, strict=True)
            if unit.checkpoint
        )
        for one in (plan, add_barrier(plan)):
            compute_s, link_s = profile.compute_s + again_s, profile.link_s(one)
            timed = time_plan(one, profile)
            assert timed.step_s >= max(compute_s, link_s) * (1 - 1e-9), seed
            assert timed.step_s <= (compute_s + link_s) * (1 + 1e-9), seed


def test_simultaneous_messages_share_the_link():
    # The reductions of b and a have different lanes: that of b 4-10, during 6-10 with that of a.
    timed = time_plan(preset_plan("dear", TWO), profile_of(TWO, lanes=2))
    assert [(m.start_s, m.end_s) for m in timed.messages[:2]] == [(4, 10), (6, 10)]
    assert timed.step_s == pytest.approx(18)


def test_lanes_keep_within_the_bounds():
    profile = profile_of(SHAPES, 3000.0, lanes=3)
    for seed in range(30):
        plan = random_plan(SHAPES, seed)
        least_s = max(profile.compute_s, profile.link_s(plan))
        assert time_plan(plan, profile).step_s >= least_s * (1 - 1e-9), seed


def test_messages_keep_the_order_of_the_plan_and_never_share_the_link():
    profile = profile_of(SHAPES, 2000.0)
    for seed in range(20):
        timed = time_plan(random_plan(SHAPES, seed), profile)
        for before, after in zip(timed.messages, timed.messages[1:], strict=False):
            assert after.start_s >= before.end_s - 1e-9 or after.start_s < before.start_s


def test_a_barrier_never_makes_a_plan_faster():
    profile = profile_of(SHAPES, 3000.0)
    eager = preset_plan("zero2", SHAPES)
    assert time_plan(add_barrier(eager), profile).step_s >= time_plan(eager, profile).step_s


def test_a_profile_is_saved_and_read_again(tmp_path):
    profile = profile_of(TWO)
    path = tmp_path / "profile.json"
    path.write_text(profile.model_dump_json(), encoding="utf-8")
    assert read_profile(path) == profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is not a profile: units"),
        ('{"units": [], "link": {"ranks": 0, "bytes_per_s": 1.0}}', "link.ranks"),
        (
            '{"units": [], "link": {"ranks": 2, "bytes_per_s": 1.0}, "schema_version": 9}',
            "is a profile of version 9",
        ),
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_the_place(tmp_path, text, message):
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_profile(path)
    with pytest.raises(ConfigError, match="cannot read the profile"):
        read_profile(tmp_path / "none.json")


def test_a_profile_of_another_model_is_refused():
    with pytest.raises(ConfigError, match="its unit 0 is a of 1000 elements, here it is in of 40"):
        time_plan(preset_plan("zero2", SHAPES), profile_of(TWO))
    with pytest.raises(ConfigError, match="its unit 1 is missing, here it is b of 2000"):
        time_plan(preset_plan("zero2", TWO), profile_of(TWO[:1]))


def test_the_stored_profiles_are_those_of_the_script():
    kept = {path.stem: read_profile(path) for path in FOLDER.glob("*.json")}
    assert kept == profiles()


@pytest.mark.parametrize("name", profiles())
def test_more_prefetching_is_never_slower(name):
    profile = profiles()[name]
    plans = [preset_plan("zero3", profile.shapes, PresetOptions(prefetch=k)) for k in (1, 2, 4)]
    steps_s = [time_plan(plan, profile).step_s for plan in plans]
    assert steps_s == sorted(steps_s, reverse=True)
    assert steps_s[0] >= max(profile.compute_s, profile.link_s(plans[0]))
