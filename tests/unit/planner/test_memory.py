"""The memory curves of plans: computed by hand for two units, within bounds for any plan."""

from itertools import pairwise

import pytest

from stretto.comm.shard_layout import make_unit_layout
from stretto.planner.memory import compute_unit_memory, worst_case_curve, zero_latency_curve
from stretto.planner.plan import ElementBytes
from stretto.planner.presets import PresetOptions, UnitShape, add_barrier, preset_plan, random_plan
from tests.unit.planner.examples import SHAPES

pytestmark = pytest.mark.usefixtures("kept_solvers")

RANKS = 2
TWO = (UnitShape("a", 32), UnitShape("b", 64))
"""Gradients have 64 and 96 elements with their has-gradient flags; each of 2 ranks owns 16 and 32.
Slots: b1, b0, update, f0, f1."""
MOMENTUM = ElementBytes(state=4)


def holdings_of(plan, element_bytes=MOMENTUM, ranks=RANKS, rank=0):
    """Return the memory of ``rank`` for units of one tensor each."""
    return [
        compute_unit_memory(
            unit,
            make_unit_layout([unit.numel], unit.blocks, ranks),
            element_bytes,
            rank,
            plan.barrier,
        )
        for unit in plan.units
    ]


@pytest.mark.parametrize(
    ("name", "preset_options", "logical", "worst"),
    [
        # 96 elements and their momentum in 4 bytes: 768. Gradients of b: 384, of a: 256.
        ("ddp", PresetOptions(), [1152, 1024, 768, 768, 768], [1152, 1408, 1408, 1408, 1152]),
        # The same with half of the momentum, and memory for all gradients: 384 + 192 + 640.
        ("zero1", PresetOptions(), [1216] * 5, [1216] * 5),
        # The parameters and half of the momentum: 576; gradients as in ddp.
        ("dear", PresetOptions(), [960, 832, 576, 576, 576], [960, 1216, 1216, 1216, 960]),
        # Half of both: 384. Parameters are whole from the update until after backward. A rank's
        # halves (64 of a, 128 of b) lie inside them, but beside them at the start and the end.
        ("zero2", PresetOptions(), [1088, 768, 704, 576, 576], [1088, 1152, 1408, 1408, 1088]),
        # Just in time; only b is whole when backward begins.
        (
            "zero3",
            PresetOptions(prefetch=0),
            [1024, 768, 384, 512, 640],
            [1024, 1152, 1024, 1152, 1024],
        ),
        # With a barrier update, reduced gradients stay where they were reduced ...
        (
            "ddp",
            PresetOptions(barrier=True),
            [1152, 1408, 1408, 768, 768],
            [1152, 1408, 1408, 768, 768],
        ),
        # ... or are copied (128 of b, 64 of a), so that the memory of gradients can be freed.
        (
            "zero2",
            PresetOptions(barrier=True),
            [1088, 896, 704, 576, 576],
            [1088, 1280, 1216, 768, 704],
        ),
        # Gradients wait until the next slot is entered: those of b and a never coexist.
        (
            "zero3",
            PresetOptions(prefetch=0, reduce_slots=0),
            [1024, 768, 384, 512, 640],
            [1024, 896, 640, 512, 640],
        ),
    ],
)
def test_the_memory_curves_of_two_units_equal_those_by_hand(name, preset_options, logical, worst):
    plan = preset_plan(name, TWO, preset_options)
    unit_memory = holdings_of(plan)
    assert zero_latency_curve(plan, unit_memory) == logical
    assert worst_case_curve(plan, unit_memory) == worst


def test_reduced_gradients_of_another_type_are_kept_until_a_barrier_update():
    # In 2 bytes: whole parameters 64 + 128, gradients 128 + 192. In 4 bytes, a rank's half of the
    # masters and of the momentum: 192 each; reduced gradients: 64 + 128.
    plan = preset_plan("zero2", TWO, PresetOptions(barrier=True))
    unit_memory = holdings_of(plan, ElementBytes(parameter=2, gradient=2, kept=4, state=4))
    assert zero_latency_curve(plan, unit_memory) == [
        384 + 192 + 192,
        384 + 64 + 128 + 128,  # whole a, reduced gradients of b, gradients of a
        384 + 192,  # all reduced gradients; once these are freed, all parameters
        384 + 192,
        384 + 192,
    ]


def test_padding_has_no_optimizer_state():
    # 20 elements on 2 ranks: rank 0 owns 16 and rank 1 owns 4, but both store 16.
    plan = preset_plan("zero2", [UnitShape("a", 20)], PresetOptions())
    kept = [holdings_of(plan, rank=rank)[0].persistent for rank in range(2)]
    assert kept == [16 * 4 + 16 * 4, 16 * 4 + 4 * 4]


WIDTHS = [
    MOMENTUM,
    ElementBytes(parameter=2, gradient=2, kept=4, state=8),
    ElementBytes(parameter=4, gradient=2, kept=4, state=8),
    ElementBytes(parameter=2, gradient=4, kept=4, state=0),
]


@pytest.mark.parametrize("element_bytes", WIDTHS)
def test_the_zero_latency_curve_is_never_above_the_worst_case(element_bytes):
    for seed in range(150):
        plan = random_plan(SHAPES, seed)
        for one in (plan, add_barrier(plan)):
            unit_memory = holdings_of(
                one, element_bytes, ranks=1 + seed % 4, rank=seed % (1 + seed % 4)
            )
            logical, worst = (
                zero_latency_curve(one, unit_memory),
                worst_case_curve(one, unit_memory),
            )
            assert all(low <= high for low, high in zip(logical, worst, strict=True)), seed


@pytest.mark.parametrize("key", ["prefetch", "reduce_slots"])
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_less_prefetch_or_pending_keeps_less(name, key):
    def curve(number):
        preset_options = PresetOptions(**{"prefetch": 0, key: number})
        plan = preset_plan(name, SHAPES, preset_options)
        return worst_case_curve(plan, holdings_of(plan))

    curves = [curve(number) for number in range(6)]
    for less, more in pairwise(curves):
        assert all(low <= high for low, high in zip(less, more, strict=True))
    assert curves[0] != curves[-1]
