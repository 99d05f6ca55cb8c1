"""The memory of plans with activations, and its parts."""

import pytest

from benchmarks.profiles import profiles
from stretto.planner.memory import Footprints
from stretto.planner.presets import (
    PLAN_PRESETS,
    PresetOptions,
    add_barrier,
    preset_plan,
    random_plan,
)
from stretto.planner.profile import Link, Profile, UnitCost
from tests.unit.planner.examples import SHAPES

UNITS = tuple(
    UnitCost(
        name=shape.name,
        numel=shape.numel,
        forward_s=1.0,
        backward_s=2.0,
        activation_bytes=3000 + 100 * index,
        input_bytes=500,
        workspace_bytes=70,
    )
    for index, shape in enumerate(SHAPES)
)
SINGLE = Profile(units=UNITS, link=Link(ranks=2, bytes_per_s=1e3), state_bytes=4, other_bytes=900)
HALF = SINGLE.model_copy(update={"parameter_bytes": 2, "gradient_bytes": 2})


def added(parts):
    return [sum(slot) for slot in zip(*parts.values(), strict=True)]


@pytest.mark.parametrize("profile", [SINGLE, HALF], ids=["single", "half"])
@pytest.mark.parametrize("seed", range(20))
def test_the_parts_of_any_plan_add_up_to_its_curve(profile, seed):
    footprints, plan = Footprints(profile), random_plan(SHAPES, seed)
    for one in (plan, add_barrier(plan)):
        parts = footprints.parts(one)
        assert added(parts) == footprints.curve(one)
        assert min(map(min, parts.values())) >= 0


@pytest.mark.parametrize("name", PLAN_PRESETS)
def test_the_parts_of_a_large_model_add_up_to_its_curve(name):
    profile = profiles()["gpt_80"]
    footprints, plan = Footprints(profile), preset_plan(name, profile.shapes)
    assert added(footprints.parts(plan)) == footprints.curve(plan)


def test_each_part_holds_the_bytes_of_its_name():
    footprints = Footprints(SINGLE)
    parts = footprints.parts(
        preset_plan("zero3", SHAPES, PresetOptions(prefetch=0, reduce_slots=0))
    )
    # The chunks of 210 elements on two ranks are padded; 900 bytes of buffers are kept, too.
    assert min(parts["always kept"]) >= 105 * (4 + 4) + 900
    assert parts["activations and workspace"] == [9370, 6170, 3070, 0, 3070, 6170, 9370]
    # 40, 100 and 70 elements, padded to 64, 128 and 96, are whole only in their own slots.
    assert parts["whole parameters"] == [384, 512, 256, 0, 256, 512, 384]
    assert parts["gradients waiting"][4:] == [0, 0, 0]
    assert parts["gradients waiting"][0] > 0


def test_memory_that_is_never_freed_counts_only_as_always_kept():
    parts = Footprints(SINGLE).parts(preset_plan("zero1", SHAPES))
    assert set(parts["whole parameters"]) == set(parts["gradients waiting"]) == {0}
    assert len(set(parts["always kept"])) == 1


@pytest.mark.parametrize("profile", [SINGLE, HALF], ids=["single", "half"])
@pytest.mark.parametrize("seed", range(10))
def test_allocator_overhead_is_added_in_every_slot(profile, seed):
    plan, taken = random_plan(SHAPES, seed), profile.with_allocator_overhead(0.1, 5000)
    given = Footprints(profile).curve(plan)
    curve = Footprints(taken).curve(plan)
    assert all(
        1.1 * less + 5000 <= more <= 1.25 * less + 5100
        for less, more in zip(given, curve, strict=True)
    )
    assert added(Footprints(taken).parts(plan)) == curve
    assert Footprints(profile.with_allocator_overhead(0.0, 0)).curve(plan) == given
