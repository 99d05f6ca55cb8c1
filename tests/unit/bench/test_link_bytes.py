"""The bytes that a plan sends over a link, compared with products made by hand."""

import pytest

from stretto.bench.step import min_link_bytes
from stretto.planner.plan import ElementBytes, Sharding, Unit
from stretto.planner.presets import UnitShape, preset_plan


@pytest.mark.parametrize(
    ("sharding", "in_host", "each"),
    [
        (Sharding.DP, False, 2 * 2),  # all-reduced: gradients cross twice
        (Sharding.ZERO1, False, 2 + 4),
        (Sharding.SDP, False, 2 + 4),
        (Sharding.ZERO2, False, 2 + 4),
        (Sharding.ZERO3, False, 2 + 4 + 4),
        (Sharding.ZERO2, True, 2 * 2),  # gathered without a link
        (Sharding.ZERO3, True, 2 * 2),
    ],
)
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_bytes_of_each_kind_of_unit(sharding, in_host, each, hosts):
    plan = preset_plan("zero2", [UnitShape("a", 100), UnitShape("b", 300)])
    units = (
        Unit(name="a", numel=100, sharding=sharding, blocks=(100,), in_host=in_host),
        Unit(name="b", numel=300, sharding=sharding, blocks=(150, 150), in_host=in_host),
    )
    element_bytes = ElementBytes(parameter=4, gradient=2)
    carried = min_link_bytes(plan.replace(units=units), element_bytes, hosts)
    assert carried == (hosts - 1) / hosts * 400 * each


def test_bytes_of_preset_plans_match_the_literature():
    shapes = [UnitShape(f"layer {i}", 1000) for i in range(10)]
    carried = {
        name: min_link_bytes(preset_plan(name, shapes), ElementBytes(), 4)
        for name in ("ddp", "zero1", "dear", "zero2", "zero3")
    }
    whole = 3 / 4 * 10_000 * 4
    assert {name for name in carried if carried[name] == 2 * whole} == {*carried} - {"zero3"}
    # The last layer is kept for backward, which begins with it.
    assert carried["zero3"] == (2 + 9 / 10) * whole
