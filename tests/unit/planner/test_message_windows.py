"""Windows are widened as far as memory allows, then trimmed to what the simulated run needs."""

import random
from dataclasses import replace
from typing import NamedTuple

import pytest

from benchmarks.memory_limits import drawn_profile
from stretto.planner.candidates import is_valid_plan
from stretto.planner.check import allowed_window, check
from stretto.planner.memory import Footprints
from stretto.planner.message_windows import (
    WindowWidener,
    WindowWidth,
    fit_windows,
    order_by_urgency,
    trim_windows,
)
from stretto.planner.plan import MessageKind, Plan, Sharding
from stretto.planner.presets import even_block_lengths
from stretto.planner.profile import Link, Profile, UnitCost
from stretto.planner.timing import time_plan
from stretto.planner.unit_choices import OptionAssigner, PlanConstraints, all_options

FAR = 1 << 20


class WindowCase(NamedTuple):
    """A plan and a memory limit in which windows are widened."""

    profile: Profile
    footprints: Footprints
    tight: Plan
    memory_limit: int
    window_width: WindowWidth


def draw_case(seed):
    """Return random options in blocks, with memory for some of the possible widening."""
    draw = random.Random(seed)
    profile = drawn_profile(draw)
    constraints = PlanConstraints(
        barrier=draw.random() < 0.4, whole_layers=draw.random() < 0.3, checkpoint=True
    )
    footprints = Footprints(profile)
    assigner = OptionAssigner(
        profile, all_options(profile, constraints, footprints), footprints, constraints
    )
    selected_options = [draw.choice(unit_options) for unit_options in assigner.options]
    block_lengths = [
        even_block_lengths(u.numel, -(-u.numel // draw.randint(1, 3))) for u in profile.units
    ]
    tight = assigner.just_in_time_plan_of(selected_options, block_lengths)
    memory_limit = footprints.peak(tight) + round(10 ** draw.uniform(4, 7.5))
    window_width = draw.choice(
        [WindowWidth(FAR, FAR), WindowWidth(2, 1), WindowWidth(draw.randint(0, 9), 3)]
    )
    keys = list(WindowWidener(tight, footprints, memory_limit).slots)
    first = tuple(draw.sample(keys, min(3, len(keys))))
    return WindowCase(profile, footprints, tight, memory_limit, replace(window_width, first=first))


def widened(case):
    widener = WindowWidener(case.tight, case.footprints, case.memory_limit)
    widener.widen(case.window_width)
    return widener


def fitted(case):
    return fit_windows(
        case.tight.units, case.footprints, case.memory_limit, case.window_width, case.tight
    )


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_widening_never_exceeds_the_memory_limit(first):
    for seed in range(first, first + 40):
        assert widened(draw_case(seed)).least_free_bytes >= 0, seed


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_a_fitted_plan_is_valid_and_its_peak_is_the_limit_minus_the_free_bytes(first):
    for seed in range(first, first + 40):
        case = draw_case(seed)
        plan = fitted(case)
        check(plan)
        peak = case.footprints.peak(plan)
        assert peak == case.memory_limit - widened(case).least_free_bytes, seed
        assert (
            peak
            == case.memory_limit
            - WindowWidener(plan, case.footprints, case.memory_limit).least_free_bytes
        ), seed


def test_widening_keeps_the_order_of_messages():
    for seed in range(60):
        case = draw_case(seed)
        plan = fitted(case)
        widener = WindowWidener(plan, case.footprints, case.memory_limit)
        widener.widen(WindowWidth(FAR, FAR))
        wide = widener.widened_plan()
        assert [(m.what, m.unit, m.block) for m in wide.messages] == [
            (m.what, m.unit, m.block) for m in plan.messages
        ]
        # An unshard for backward that must stay in its cycle uses less than was reserved for it.
        assert case.footprints.peak(wide) <= case.memory_limit - widener.least_free_bytes, seed


def test_only_windows_without_memory_are_narrower_than_allowed():
    narrow = 0
    for seed in range(60):
        case = draw_case(seed)._replace(window_width=WindowWidth(FAR, FAR))
        widener = widened(case)
        for what, unit, block in widener.slots:
            first, last = allowed_window(case.tight, what, unit)
            # If no window can grow by one more slot, a second round changes nothing.
            reached = last if what is MessageKind.REDUCE else first
            narrow += widener.slots[what, unit, block] != reached
        before = dict(widener.slots)
        widener.widen(WindowWidth(FAR, FAR))
        assert widener.slots == before, seed
    assert narrow > 50, "in some of these cases memory must be short"


def test_with_ample_memory_every_window_is_as_wide_as_allowed():
    for seed in range(20):
        case = draw_case(seed)._replace(memory_limit=1 << 40, window_width=WindowWidth(FAR, FAR))
        for (what, unit, _), slot in widened(case).slots.items():
            first, last = allowed_window(case.tight, what, unit)
            assert slot == (last if what is MessageKind.REDUCE else first), seed


def test_no_window_is_wider_than_requested():
    for seed in range(40):
        case = draw_case(seed)
        for (what, unit, _), slot in widened(case).slots.items():
            if what is MessageKind.REDUCE:
                backward = case.tight.slots.backward(unit)
                assert slot <= backward + 1 + case.window_width.reduce_slots, seed
            else:
                last = allowed_window(case.tight, what, unit)[1]
                assert slot >= last - case.window_width.prefetch, seed


def test_no_plan_fits_into_less_than_the_tightest_one():
    for seed in range(10):
        case = draw_case(seed)
        peak = case.footprints.peak(case.tight)
        assert fitted(case._replace(memory_limit=peak)) is not None
        assert fitted(case._replace(memory_limit=peak - 1)) is None


def four_units():
    """Return the footprints and the just-in-time plan of four equal zero3 units."""
    costs = {"numel": 4096, "forward_s": 1.0, "backward_s": 2.0}
    profile = Profile(
        units=tuple(UnitCost(name=f"u{i}", **costs) for i in range(4)),
        link=Link(ranks=2, bytes_per_s=1e4),
    )
    footprints, constraints = Footprints(profile), PlanConstraints(shardings=(Sharding.ZERO3,))
    assigner = OptionAssigner(
        profile, all_options(profile, constraints, footprints), footprints, constraints
    )
    return footprints, assigner.just_in_time_plan_of(
        [unit_options[0] for unit_options in assigner.options]
    )


@pytest.mark.parametrize(
    ("first", "prefetch"),
    [(None, [1] * 4), (1, [0, 2, 1, 1]), (2, [0, 0, 3, 1]), (3, [0, 0, 0, 4])],
)
def test_the_first_message_gets_memory_that_only_one_can_have(first, prefetch):
    # In forward there is memory for one unit beside the running one. Without priorities, each unit
    # is unsharded one slot ahead. A unit with priority is unsharded as early as allowed, and the
    # units before it only when they are used.
    footprints, tight = four_units()
    widener = WindowWidener(tight, footprints, footprints.peak(tight))
    before = dict(widener.slots)
    widener.widen(
        WindowWidth(4, 0, first=() if first is None else ((MessageKind.UNSHARD, first, 0),))
    )
    keys = [(MessageKind.UNSHARD, unit, 0) for unit in range(4)]
    assert [before[key] - widener.slots[key] for key in keys] == prefetch


def built(seed):
    """Return a plan as the planner builds one: fitted, ordered, widened as far as memory allows."""
    case = draw_case(seed)
    plan = fitted(case)
    plan = order_by_urgency(plan, case.profile)
    if plan is None or not is_valid_plan(plan):
        return case, None
    widener = WindowWidener(plan, case.footprints, case.memory_limit)
    widener.widen(WindowWidth(FAR, FAR))
    wide = widener.widened_plan()
    return case, wide if is_valid_plan(wide) else plan


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_trimmed_windows_take_as_long_and_never_more_memory(first):
    tried = narrower = 0
    for seed in range(first, first + 40):
        case, plan = built(seed)
        if plan is None:
            continue
        narrow = trim_windows(plan, case.profile)
        check(narrow)
        step_s = time_plan(plan, case.profile).step_s
        assert time_plan(narrow, case.profile).step_s == pytest.approx(step_s, rel=1e-9), seed
        assert case.footprints.peak(narrow) <= case.footprints.peak(plan), seed
        tried, narrower = tried + 1, narrower + (narrow != plan)
    assert tried >= 25
    assert narrower >= 15
