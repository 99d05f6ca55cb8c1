"""A plan that cannot be executed is refused with the reason and the slot; valid plans pass."""

import itertools

import pytest

from stretto.planner.check import PlanError, check
from stretto.planner.plan import MessageKind, Plan, PlanMessage, Sharding
from stretto.planner.presets import (
    PLAN_PRESETS,
    PresetOptions,
    UnitShape,
    add_barrier,
    preset_plan,
    random_plan,
)
from tests.unit.planner.examples import (
    SHAPES,
    moved,
    plan_of,
    put_first,
    put_last,
    with_more,
    without,
)

REDUCE, UNSHARD, UNSHARD_FOR_BACKWARD = tuple(MessageKind)
TIED = (UnitShape("embed", 40, used_often=True), *SHAPES[1:])


def message(what, unit, gate, due, block=0):
    return PlanMessage(what=what, unit=unit, block=block, gate=gate, due=due)


@pytest.mark.parametrize(
    ("plan", "what", "unit", "reason"),
    [
        ("ddp", REDUCE, 0, r"reduce of unit 0 \(in\), block 0 is missing"),
        ("zero2", UNSHARD, 1, r"unshard of unit 1 \(mid\), block 0 is missing"),
        (
            "zero3",
            UNSHARD_FOR_BACKWARD,
            0,
            r"unshard_for_backward of unit 0 \(in\), block 0 is missing",
        ),
    ],
)
def test_a_message_that_is_missing_is_named(plan, what, unit, reason):
    with pytest.raises(PlanError, match=reason):
        check(without(plan_of(plan), what, unit))


def test_a_block_that_is_not_unsharded_is_named():
    with pytest.raises(PlanError, match=r"unshard of unit 1 \(mid\), block 1 is missing"):
        check(without(plan_of("zero2", block=50), UNSHARD, 1, block=1))


def test_a_message_that_is_there_twice_is_refused():
    plan = plan_of("zero2")
    with pytest.raises(PlanError, match="reduce of unit 2, block 0 is there 2 times"):
        check(with_more(plan, plan.messages[0]))


@pytest.mark.parametrize(
    ("plan", "extra", "reason"),
    [
        ("zero2", message(REDUCE, 3, 0, 6), "unit 3, block 0: there is no such block"),
        ("zero2", message(REDUCE, 1, 1, 5, block=1), "unit 1, block 1: there is no such block"),
        ("ddp", message(UNSHARD, 0, 3, 4), "unshard of unit 0, block 0: dp has no such message"),
        (
            "zero2",
            message(UNSHARD_FOR_BACKWARD, 0, 5, 2),
            "unshard_for_backward of unit 0, .*: zero2 has no such message",
        ),
    ],
)
def test_a_message_that_no_sharding_needs_is_refused(plan, extra, reason):
    with pytest.raises(PlanError, match=reason):
        check(with_more(plan_of(plan), extra))


@pytest.mark.parametrize(
    ("what", "unit", "slots", "seen"),
    [
        (REDUCE, 0, {"gate": 1}, r"from slot 1 \(b1\) on .*expected from b0 on"),
        (REDUCE, 0, {"due": 2}, r"due at 2 \(b0\): .*due between update and f0"),
        (REDUCE, 0, {"due": 5}, r"due at 5 \(f1\): .*due between update and f0"),
        (REDUCE, 0, {"gate": 4, "due": 3}, r"from slot 4 \(f0\) on and is due at 3 \(update\)"),
        (REDUCE, 0, {"due": 7}, r"due at 7 \(b2 of the cycle after\)"),
        (UNSHARD, 0, {"gate": 2}, r"from slot 2 \(b0\) on .*expected from update on"),
        (UNSHARD, 1, {"due": 4}, r"due at 4 \(f0\): .*due between f1 and f1"),
        (UNSHARD, 1, {"due": 6}, r"due at 6 \(f2\): .*due between f1 and f1"),
        (UNSHARD_FOR_BACKWARD, 0, {"gate": 4}, r"from slot 4 \(f0\) on .*expected from f1 on"),
        (UNSHARD_FOR_BACKWARD, 0, {"gate": 3}, r"from slot 3 \(update\) on"),
        (UNSHARD_FOR_BACKWARD, 0, {"due": 1}, r"due at 1 \(b1\): .*b0 of the cycle after"),
        (UNSHARD_FOR_BACKWARD, 0, {"due": 9}, r"due at 9 \(b0 of the cycle after\)"),
    ],
)
def test_a_window_is_kept_at_both_ends(what, unit, slots, seen):
    with pytest.raises(PlanError, match=rf"{what} of unit {unit} .*{seen}"):
        check(moved(plan_of("zero3"), what, unit, **slots))


@pytest.mark.parametrize(
    ("what", "slots", "seen"),
    [
        (REDUCE, {"due": 4}, r"due at 4 \(f0\): .*due between b0 and update"),
        (UNSHARD, {"gate": 2}, r"from slot 2 \(b0\) on .*expected from update on"),
    ],
)
def test_with_a_barrier_windows_end_and_begin_at_the_update(what, slots, seen):
    check(moved(plan_of("zero2"), what, 1, **slots))
    with pytest.raises(PlanError, match=seen):
        check(moved(plan_of("zero2", barrier=True), what, 1, **slots))


def test_an_unshard_before_its_reduction_is_refused():
    reason = r"unshard of unit 2 \(out\), .* slot 3 \(update\), stands before the reduction"
    with pytest.raises(PlanError, match=reason):
        check(put_first(plan_of("zero2"), UNSHARD, 2))


@pytest.mark.parametrize("whole_layers", [False, True])
def test_an_update_of_whole_layers_waits_for_all_blocks(whole_layers):
    # Block 0 of the last unit is unsharded between the reductions of its two blocks.
    plan = moved(plan_of("dear", block=50), UNSHARD, 2, gate=1)
    plan = put_first(plan, UNSHARD, 2)
    plan = put_first(plan, REDUCE, 2).replace(whole_layers=whole_layers)
    if not whole_layers:
        check(plan)
        return
    with pytest.raises(PlanError, match=r"unit 2 \(out, block 0\).*the reduction of block 1"):
        check(plan)


def test_a_slot_does_not_wait_for_a_message_behind_a_later_one():
    # The first reduction may not start before f1; that of unit 0 behind it is due at f0.
    reason = (
        r"slot 4 \(f0\) waits for the reduce of unit 0 \(in\), which stands behind the reduce of "
        r"unit 2 \(out\), and that cannot begin before the end of slot f1"
    )
    with pytest.raises(PlanError, match=reason):
        check(moved(plan_of("zero2"), REDUCE, 2, gate=5))


def test_a_reduction_stands_behind_no_backward_that_comes_later():
    plan = put_first(moved(plan_of("zero3", prefetch=1), REDUCE, 2, due=1), REDUCE, 1)
    with pytest.raises(
        PlanError, match=r"slot 1 \(b1\) waits for the (reduce|unshard_for_backward) of unit"
    ):
        check(plan)


def test_a_deadlock_across_the_end_of_a_cycle_is_refused():
    # The unshard for backward of unit 0 may start only at b0 of the next cycle. Behind it stands
    # the message of unit 1, which is due at b1 of that cycle.
    plan = put_last(
        moved(plan_of("zero3", prefetch=1), UNSHARD_FOR_BACKWARD, 0, gate=9),
        UNSHARD_FOR_BACKWARD,
        0,
    )
    with pytest.raises(PlanError, match="unshard_for_backward of unit 0"):
        check(plan)


def test_a_unit_that_is_used_often_is_not_resharded_after_forward():
    first = plan_of("zero3").units[0].model_copy(update={"used_often": True})
    plan = plan_of("zero3")
    with pytest.raises(PlanError, match=r"unit 0 \(in\) is zero3, .* at the end of f0.* zero2"):
        check(plan.replace(units=(first, *plan.units[1:])))


def test_blocks_add_up_to_their_unit():
    plan = plan_of("zero2")
    short = plan.units[1].model_copy(update={"blocks": (60, 39)})
    with pytest.raises(PlanError, match=r"unit 1 \(mid\) has 100 elements, its blocks 99"):
        check(plan.replace(units=(plan.units[0], short, plan.units[2])))


def test_a_plan_without_units_is_refused():
    with pytest.raises(PlanError, match="nothing to train"):
        check(Plan(units=(), messages=()))


@pytest.mark.parametrize("name", PLAN_PRESETS)
@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[:1], TIED], ids=["three", "one", "tied"])
def test_every_preset_is_valid_with_all_settings(name, shapes):
    few = [None, 0, 1, 9]
    for prefetch, reduce_slots, block in itertools.product(few, few, [None, 7, 50]):
        for barrier, whole_layers in itertools.product([False, True], repeat=2):
            preset_options = PresetOptions(prefetch, reduce_slots, block, barrier, whole_layers)
            plan = preset_plan(name, shapes, preset_options)
            check(plan)
            check(add_barrier(plan))


@pytest.mark.parametrize("whole_layers", [False, True])
def test_every_random_plan_is_valid_and_stays_so_with_a_barrier(whole_layers):
    several = [UnitShape(f"u{i}", 1 + 13 * i) for i in range(6)]
    for seed in range(300):
        shapes = [TIED, SHAPES[:1], several][seed % 3]
        plan = random_plan(shapes, seed, whole_layers=whole_layers)
        check(plan)
        behind = add_barrier(plan)
        check(behind)
        assert behind.barrier
        assert behind.units == plan.units


def test_random_plans_differ_in_everything_that_may_be_chosen():
    plans = [random_plan(SHAPES, seed) for seed in range(60)]
    assert {unit.sharding for plan in plans for unit in plan.units} == set(Sharding)
    for key in ("checkpoint", "in_host"):
        assert {getattr(unit, key) for plan in plans for unit in plan.units} == {False, True}
    assert {plan.barrier for plan in plans} == {False, True}
    assert {len(unit.blocks) for plan in plans for unit in plan.units} == {1, 2, 3}
    assert len({plan.digest() for plan in plans}) == len(plans)
    assert random_plan(SHAPES, 7) == random_plan(SHAPES, 7)


def test_a_barrier_keeps_the_order_of_reductions_and_puts_unshards_behind_them():
    for seed in range(20):
        plan = random_plan(SHAPES, seed)
        behind = add_barrier(plan)
        kinds = [m.what for m in behind.messages]
        last = max(i for i, what in enumerate(kinds) if what is REDUCE)
        assert UNSHARD not in kinds[:last]
        for what in MessageKind:
            before = [(m.unit, m.block) for m in plan.messages_of(what)]
            assert sorted(before) == sorted((m.unit, m.block) for m in behind.messages_of(what))
            if what is not UNSHARD_FOR_BACKWARD:
                assert before == [(m.unit, m.block) for m in behind.messages_of(what)]


def test_a_dp_unit_is_not_sharded_inside_hosts():
    plan = plan_of("ddp")
    units = tuple(unit.model_copy(update={"in_host": True}) for unit in plan.units)
    with pytest.raises(PlanError, match=r"unit 0 \(in\) is dp, .*in_host"):
        check(plan.replace(units=units))
