"""What a plan keeps with its activations, and what that is made of."""

import pytest

from benchmarks.profiles import profiles
from stretto.plan.building import with_barrier
from stretto.plan.footprint import Footprints
from stretto.plan.presets import PRESETS, Wish, named_plan, random_plan
from stretto.plan.profile import Link, Profile, UnitCost
from tests.unit.plan.made_up import SHAPES

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
    for one in (plan, with_barrier(plan)):
        parts = footprints.parts(one)
        assert added(parts) == footprints.curve(one)
        assert min(map(min, parts.values())) >= 0


@pytest.mark.parametrize("name", PRESETS)
def test_the_parts_of_a_large_model_add_up_to_its_curve(name):
    profile = profiles()["gpt_80"]
    footprints, plan = Footprints(profile), named_plan(name, profile.shapes)
    assert added(footprints.parts(plan)) == footprints.curve(plan)


def test_each_part_has_what_its_name_says():
    footprints = Footprints(SINGLE)
    parts = footprints.parts(named_plan("zero3", SHAPES, Wish(prefetch=0, pending=0)))
    # Two ranks' chunks of 210 elements are padded; buffers of 900 bytes stay as well.
    assert min(parts["always kept"]) >= 105 * (4 + 4) + 900
    assert parts["activations and workspace"] == [9370, 6170, 3070, 0, 3070, 6170, 9370]
    # 40, 100 and 70 elements, padded to 64, 128 and 96, come for their slots and go with them.
    assert parts["whole parameters"] == [384, 512, 256, 0, 256, 512, 384]
    assert parts["gradients waiting"][4:] == [0, 0, 0]
    assert parts["gradients waiting"][0] > 0


def test_what_stays_is_nowhere_but_in_what_is_always_kept():
    parts = Footprints(SINGLE).parts(named_plan("zero1", SHAPES))
    assert set(parts["whole parameters"]) == set(parts["gradients waiting"]) == {0}
    assert len(set(parts["always kept"])) == 1


@pytest.mark.parametrize("profile", [SINGLE, HALF], ids=["single", "half"])
@pytest.mark.parametrize("seed", range(10))
def test_an_allocator_with_holes_takes_its_share_in_every_slot(profile, seed):
    plan, taken = random_plan(SHAPES, seed), profile.with_holes(0.1, 5000)
    given = Footprints(profile).curve(plan)
    curve = Footprints(taken).curve(plan)
    assert all(
        1.1 * less + 5000 <= more <= 1.25 * less + 5100
        for less, more in zip(given, curve, strict=True)
    )
    assert added(Footprints(taken).parts(plan)) == curve
    assert Footprints(profile.with_holes(0.0, 0)).curve(plan) == given
