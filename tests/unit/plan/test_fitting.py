"""Windows as wide as there is room, and no wider; then as narrow as they are needed."""

import random
from dataclasses import replace
from typing import NamedTuple

import pytest

from benchmarks.budgets import drawn_profile
from stretto.plan.candidates import is_sound
from stretto.plan.check import check, window
from stretto.plan.choosing import Choosing
from stretto.plan.fitting import Reach, Room, fit
from stretto.plan.footprint import Footprints
from stretto.plan.options import Allowed, all_options
from stretto.plan.ordering import put_in_order
from stretto.plan.presets import even_blocks
from stretto.plan.profile import Link, Profile, UnitCost
from stretto.plan.timing import time_plan
from stretto.plan.trimming import trimmed
from stretto.plan.value import Plan, Sharding, What

FAR = 1 << 20


class Drawn(NamedTuple):
    """What windows are to be widened in."""

    profile: Profile
    footprints: Footprints
    tight: Plan
    budget: int
    reach: Reach


def drawn(seed):
    """Return random options in blocks, with room for some of what they could use."""
    draw = random.Random(seed)
    profile = drawn_profile(draw)
    allowed = Allowed(
        barrier=draw.random() < 0.4, whole_layers=draw.random() < 0.3, checkpoint=True
    )
    footprints = Footprints(profile)
    choosing = Choosing(profile, all_options(profile, allowed, footprints), footprints, allowed)
    chosen = [draw.choice(mine) for mine in choosing.options]
    cuts = [even_blocks(u.numel, -(-u.numel // draw.randint(1, 3))) for u in profile.units]
    tight = choosing.tightest(chosen, cuts)
    budget = footprints.peak(tight) + round(10 ** draw.uniform(4, 7.5))
    reach = draw.choice([Reach(FAR, FAR), Reach(2, 1), Reach(draw.randint(0, 9), 3)])
    keys = list(Room(tight, footprints, budget).slots)
    first = tuple(draw.sample(keys, min(3, len(keys))))
    return Drawn(profile, footprints, tight, budget, replace(reach, first=first))


def widened(case):
    room = Room(case.tight, case.footprints, case.budget)
    room.widen(case.reach)
    return room


def fitted(case):
    return fit(case.tight.units, case.footprints, case.budget, case.reach, case.tight)


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_whatever_is_widened_there_is_never_less_than_nothing_left(first):
    for seed in range(first, first + 40):
        assert widened(drawn(seed)).least >= 0, seed


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_a_plan_that_was_fitted_is_sound_and_keeps_the_budget_but_for_the_room_left(first):
    for seed in range(first, first + 40):
        case = drawn(seed)
        plan = fitted(case)
        check(plan)
        peak = case.footprints.peak(plan)
        assert peak == case.budget - widened(case).least, seed
        assert peak == case.budget - Room(plan, case.footprints, case.budget).least, seed


def test_windows_are_widened_into_the_order_they_had():
    for seed in range(60):
        case = drawn(seed)
        plan = fitted(case)
        room = Room(plan, case.footprints, case.budget)
        room.widen(Reach(FAR, FAR))
        wide = room.widened()
        assert [(m.what, m.unit, m.block) for m in wide.messages] == [
            (m.what, m.unit, m.block) for m in plan.messages
        ]
        # A regather that stays on its side of the turn needs less than it was given.
        assert case.footprints.peak(wide) <= case.budget - room.least, seed


def test_only_what_has_no_room_is_narrower_than_it_may_be():
    narrow = 0
    for seed in range(60):
        case = drawn(seed)._replace(reach=Reach(FAR, FAR))
        room = widened(case)
        for what, unit, block in room.slots:
            first, last = window(case.tight, what, unit)
            # Without room for one slot more a second round has nothing to add.
            reached = last if what is What.REDUCE else first
            narrow += room.slots[what, unit, block] != reached
        before = dict(room.slots)
        room.widen(Reach(FAR, FAR))
        assert room.slots == before, seed
    assert narrow > 50, "in some of these cases room must be short"


def test_with_room_for_all_every_window_is_as_wide_as_it_may_be():
    for seed in range(20):
        case = drawn(seed)._replace(budget=1 << 40, reach=Reach(FAR, FAR))
        for (what, unit, _), slot in widened(case).slots.items():
            first, last = window(case.tight, what, unit)
            assert slot == (last if what is What.REDUCE else first), seed


def test_no_window_is_wider_than_it_was_asked_to_be():
    for seed in range(40):
        case = drawn(seed)
        for (what, unit, _), slot in widened(case).slots.items():
            if what is What.REDUCE:
                backward = case.tight.slots.backward(unit)
                assert slot <= backward + 1 + case.reach.pending, seed
            else:
                last = window(case.tight, what, unit)[1]
                assert slot >= last - case.reach.ahead, seed


def test_nothing_fits_into_less_than_the_tightest_plan():
    for seed in range(10):
        case = drawn(seed)
        peak = case.footprints.peak(case.tight)
        assert fitted(case._replace(budget=peak)) is not None
        assert fitted(case._replace(budget=peak - 1)) is None


def four_units():
    """Return four equal units that are gathered twice, just in time, and their profile."""
    costs = {"numel": 4096, "forward_s": 1.0, "backward_s": 2.0}
    profile = Profile(
        units=tuple(UnitCost(name=f"u{i}", **costs) for i in range(4)),
        link=Link(ranks=2, bytes_per_s=1e4),
    )
    footprints, allowed = Footprints(profile), Allowed(shardings=(Sharding.ZERO3,))
    choosing = Choosing(profile, all_options(profile, allowed, footprints), footprints, allowed)
    return footprints, choosing.tightest([mine[0] for mine in choosing.options])


@pytest.mark.parametrize(
    ("first", "ahead"), [(None, [1] * 4), (1, [0, 2, 1, 1]), (2, [0, 0, 3, 1]), (3, [0, 0, 0, 4])]
)
def test_whoever_is_first_gets_the_room_that_only_one_can_have(first, ahead):
    # In forward there is room for one unit beside the one that runs. In turn each is gathered a
    # slot ahead; whoever is first comes as early as it may, and those before it not at all.
    footprints, tight = four_units()
    room = Room(tight, footprints, footprints.peak(tight))
    before = dict(room.slots)
    room.widen(Reach(4, 0, first=() if first is None else ((What.GATHER, first, 0),)))
    keys = [(What.GATHER, unit, 0) for unit in range(4)]
    assert [before[key] - room.slots[key] for key in keys] == ahead


def built(seed):
    """Return a plan as the planner makes one: fitted, in order, as wide as there is room."""
    case = drawn(seed)
    plan = fitted(case)
    plan = put_in_order(plan, case.profile)
    if plan is None or not is_sound(plan):
        return case, None
    room = Room(plan, case.footprints, case.budget)
    room.widen(Reach(FAR, FAR))
    wide = room.widened()
    return case, wide if is_sound(wide) else plan


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_narrower_windows_take_as_long_and_never_more_memory(first):
    tried = narrower = 0
    for seed in range(first, first + 40):
        case, plan = built(seed)
        if plan is None:
            continue
        narrow = trimmed(plan, case.profile)
        check(narrow)
        step_s = time_plan(plan, case.profile).step_s
        assert time_plan(narrow, case.profile).step_s == pytest.approx(step_s, rel=1e-9), seed
        assert case.footprints.peak(narrow) <= case.footprints.peak(plan), seed
        tried, narrower = tried + 1, narrower + (narrow != plan)
    assert tried >= 25
    assert narrower >= 15
