"""What a plan makes a link carry, against products made by hand."""

import pytest

from stretto.measure.carried import link_bytes
from stretto.plan.memory import Widths
from stretto.plan.presets import Shape, named_plan
from stretto.plan.value import Sharding, Unit


@pytest.mark.parametrize(
    ("sharding", "in_host", "each"),
    [
        (Sharding.DP, False, 2 * 2),  # sums travel twice, as gradients do
        (Sharding.ZERO1, False, 2 + 4),
        (Sharding.SDP, False, 2 + 4),
        (Sharding.ZERO2, False, 2 + 4),
        (Sharding.ZERO3, False, 2 + 4 + 4),
        (Sharding.ZERO2, True, 2 * 2),  # gathered without a link
        (Sharding.ZERO3, True, 2 * 2),
    ],
)
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_each_kind_of_unit(sharding, in_host, each, hosts):
    plan = named_plan("zero2", [Shape("a", 100), Shape("b", 300)])
    units = (
        Unit(name="a", numel=100, sharding=sharding, blocks=(100,), in_host=in_host),
        Unit(name="b", numel=300, sharding=sharding, blocks=(150, 150), in_host=in_host),
    )
    widths = Widths(parameter=4, gradient=2)
    carried = link_bytes(plan.replace(units=units), widths, hosts)
    assert carried == (hosts - 1) / hosts * 400 * each


def test_plans_by_name_cost_what_people_say():
    shapes = [Shape(f"layer {i}", 1000) for i in range(10)]
    carried = {
        name: link_bytes(named_plan(name, shapes), Widths(), 4)
        for name in ("ddp", "zero1", "dear", "zero2", "zero3")
    }
    whole = 3 / 4 * 10_000 * 4
    assert {name for name in carried if carried[name] == 2 * whole} == {*carried} - {"zero3"}
    # The last layer stays for backward, which begins with it.
    assert carried["zero3"] == (2 + 9 / 10) * whole
