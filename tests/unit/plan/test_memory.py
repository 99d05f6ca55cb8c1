"""What a plan keeps, by hand for two units, and in bounds for any plan."""

from itertools import pairwise

import pytest

from stretto.comm.shards import lay_unit
from stretto.plan.building import with_barrier
from stretto.plan.memory import Widths, holding, logical_curve, worst_curve
from stretto.plan.presets import Shape, Wish, named_plan, random_plan
from tests.unit.plan.made_up import SHAPES

RANKS = 2
TWO = (Shape("a", 32), Shape("b", 64))
"""With marks, gradients of 64 and 96 elements on 2 ranks, who own 16 and 32. Slots: b1, b0, update,
f0, f1."""
MOMENTUM = Widths(state=4)


def holdings_of(plan, widths=MOMENTUM, ranks=RANKS, rank=0):
    """Return what ``rank`` keeps for units of one tensor each."""
    return [
        holding(unit, lay_unit([unit.numel], unit.blocks, ranks), widths, rank, plan.barrier)
        for unit in plan.units
    ]


@pytest.mark.parametrize(
    ("name", "wish", "logical", "worst"),
    [
        # 96 elements and their momentum in 4 bytes: 768. Gradients of b: 384, of a: 256.
        ("ddp", Wish(), [1152, 1024, 768, 768, 768], [1152, 1408, 1408, 1408, 1152]),
        # The same with half of the momentum, and room for all gradients: 384 + 192 + 640.
        ("zero1", Wish(), [1216] * 5, [1216] * 5),
        # The parameters and half of the momentum: 576; gradients as in ddp.
        ("dear", Wish(), [960, 832, 576, 576, 576], [960, 1216, 1216, 1216, 960]),
        # Half of both: 384. Whole parameters from the update until after backward, a rank's halves
        # (64 of a, 128 of b) inside them; beside them when they come and go.
        ("zero2", Wish(), [1088, 768, 704, 576, 576], [1088, 1152, 1408, 1408, 1088]),
        # Just in time, and only b is there when backward begins.
        ("zero3", Wish(prefetch=0), [1024, 768, 384, 512, 640], [1024, 1152, 1024, 1152, 1024]),
        # For an update that waits for all, sums lie where they were reduced ...
        ("ddp", Wish(barrier=True), [1152, 1408, 1408, 768, 768], [1152, 1408, 1408, 768, 768]),
        # ... or are copied (b's 128, a's 64), so that the room of gradients can be given back.
        ("zero2", Wish(barrier=True), [1088, 896, 704, 576, 576], [1088, 1280, 1216, 768, 704]),
        # Gradients wait for the next slot to be entered: b's are never there with those of a.
        (
            "zero3",
            Wish(prefetch=0, pending=0),
            [1024, 768, 384, 512, 640],
            [1024, 896, 640, 512, 640],
        ),
    ],
)
def test_the_curve_of_two_units_is_the_one_made_by_hand(name, wish, logical, worst):
    plan = named_plan(name, TWO, wish)
    held = holdings_of(plan)
    assert logical_curve(plan, held) == logical
    assert worst_curve(plan, held) == worst


def test_sums_of_another_type_are_kept_until_an_update_that_waits_for_all():
    # In 2 bytes: whole parameters 64 + 128, gradients 128 + 192. In 4 bytes, a rank's half of the
    # masters and of the momentum: 192 each; sums: 64 + 128.
    plan = named_plan("zero2", TWO, Wish(barrier=True))
    held = holdings_of(plan, Widths(parameter=2, gradient=2, kept=4, state=4))
    assert logical_curve(plan, held) == [
        384 + 192 + 192,
        384 + 64 + 128 + 128,  # whole a, sums of b, gradients of a
        384 + 192,  # all sums; then, these gone, all parameters
        384 + 192,
        384 + 192,
    ]


def test_what_a_rank_owns_of_padding_is_remembered_by_nobody():
    # 20 elements on 2 ranks: 16 are of rank 0, 4 of rank 1, and both keep 16.
    plan = named_plan("zero2", [Shape("a", 20)], Wish())
    kept = [holdings_of(plan, rank=rank)[0].always for rank in range(2)]
    assert kept == [16 * 4 + 16 * 4, 16 * 4 + 4 * 4]


WIDTHS = [
    MOMENTUM,
    Widths(parameter=2, gradient=2, kept=4, state=8),
    Widths(parameter=4, gradient=2, kept=4, state=8),
    Widths(parameter=2, gradient=4, kept=4, state=0),
]


@pytest.mark.parametrize("widths", WIDTHS)
def test_no_slot_keeps_more_than_the_worst_that_is_charged(widths):
    for seed in range(150):
        plan = random_plan(SHAPES, seed)
        for one in (plan, with_barrier(plan)):
            held = holdings_of(one, widths, ranks=1 + seed % 4, rank=seed % (1 + seed % 4))
            logical, worst = logical_curve(one, held), worst_curve(one, held)
            assert all(low <= high for low, high in zip(logical, worst, strict=True)), seed


@pytest.mark.parametrize("key", ["prefetch", "pending"])
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_whoever_asks_for_less_keeps_less(name, key):
    def curve(number):
        wish = Wish(**{"prefetch": 0, key: number})
        plan = named_plan(name, SHAPES, wish)
        return worst_curve(plan, holdings_of(plan))

    curves = [curve(number) for number in range(6)]
    for less, more in pairwise(curves):
        assert all(low <= high for low, high in zip(less, more, strict=True))
    assert curves[0] != curves[-1]
