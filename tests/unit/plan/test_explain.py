"""A plan in words: a reason for every unit, and what memory is worth."""

import re
from functools import cache

import pytest

from benchmarks.profiles import profiles
from stretto.plan.explain import GIB, HEADERS, explain, ms_per_gib
from stretto.plan.footprint import Footprints
from stretto.plan.options import Allowed, all_options
from stretto.plan.planner import _arrays, make_plan
from stretto.plan.presets import Wish, named_plan
from stretto.plan.profile import Link, Profile, UnitCost
from stretto.plan.relaxed import Relaxation
from stretto.plan.solving import Solver
from stretto.plan.value import Sharding


@cache
def middle_of(name):
    """Return what lies in the middle of what zero3 and zero2 need."""
    profile = profiles()[name]
    wishes = {"zero3": Wish(1, 1, barrier=True), "zero2": Wish(1, barrier=True)}
    plans = [named_plan(preset, profile.shapes, wish) for preset, wish in wishes.items()]
    return sum(map(Footprints(profile).peak, plans)) // 2


@cache
def planned_for(name):
    return make_plan(profiles()[name], middle_of(name))


def small_profile(rate=1e9, **unit):
    costs = {"numel": 100_000, "forward_s": 1.0, "backward_s": 2.0, **unit}
    units = [UnitCost(name=f"u{i}", **costs) for i in range(3)]
    return Profile(units=tuple(units), link=Link(ranks=2, bytes_per_s=rate), state_bytes=8)


def relaxed_s(profile, budget):
    """Return the bound of fractions, with every unit a group of its own."""
    options = all_options(profile, Allowed(), Footprints(profile))
    groups = [range(i, i + 1) for i in range(len(options))]
    problem = Relaxation(profile, options, groups, Allowed()).problem(budget)
    with Solver() as solver:
        return problem.base_s + solver.solve(_arrays(problem), whole=False, limit_s=20).bound


@pytest.mark.parametrize("name", ["gpt_80", "vgg16_10"])
def test_every_unit_has_a_row_and_a_reason(name):
    planned, profile = planned_for(name), profiles()[name]
    rows = explain(planned, profile).rows
    assert [row[0] for row in rows] == [unit.name for unit in profile.units]
    for row, unit in zip(rows, planned.plan.units, strict=True):
        told = dict(zip(HEADERS, row, strict=True))
        assert told["kept as"].split(", ")[0] == unit.sharding
        assert told["blocks"] == str(len(unit.blocks))
        assert len(told["why"]) > 20


def test_reasons_are_those_of_how_units_are_kept():
    planned = planned_for("gpt_80")
    rows = explain(planned, profiles()["gpt_80"]).rows
    begins = {Sharding.ZERO3: "let go after forward", Sharding.ZERO2: "kept until backward"}
    for row, unit in zip(rows[:-1], planned.plan.units[:-1], strict=True):
        assert row[-1].startswith(begins[unit.sharding])
    assert rows[-1][-1].startswith("backward begins with it")


def test_what_is_gathered_again_is_told_with_its_bytes_and_seconds():
    # Two bytes for each of 12 * 4096^2 weights, an eighth of them the rank's own in 32 bits beside
    # them: all 403 MB go. They are gathered in 7/8 of 403 MB at 80 GB a second, and 0.02 ms.
    rows = explain(planned_for("gpt_80"), profiles()["gpt_80"]).rows
    freed = [row for row in rows if row[2] == "zero3" and row[0].startswith("block")]
    assert freed
    for row in freed:
        assert row[1] == "403 MB"
        assert "gathered again for 4.42 ms of the link, which frees 403 MB in b25" in row[-1]


def test_the_price_of_memory_is_what_a_little_more_of_it_saves():
    planned, profile = planned_for("gpt_80"), profiles()["gpt_80"]
    budget, more = planned.budget, planned.budget // 100
    saved_s = relaxed_s(profile, budget) - relaxed_s(profile, budget + more)
    assert saved_s > 1e-3
    assert ms_per_gib(planned) * more / GIB * 1e-3 == pytest.approx(saved_s, rel=0.05)


def test_where_memory_is_short_it_is_told_with_its_worth():
    planned = planned_for("gpt_80")
    told = explain(planned, profiles()["gpt_80"]).memory
    dearest = max(range(len(planned.prices)), key=planned.prices.__getitem__)
    where, worth = re.fullmatch(
        r"memory is short in (\w+): 1 % more .* a step, ([\d.]+) ms a GiB", told
    ).groups()
    assert where == planned.plan.slots.name(dearest)
    assert float(worth) == pytest.approx(ms_per_gib(planned), abs=0.06)


def test_where_memory_is_not_short_that_is_told():
    profile = small_profile()
    planned = make_plan(profile, 1 << 30)
    assert ms_per_gib(planned) == pytest.approx(0, abs=1e-3)
    told = explain(planned, profile).memory
    assert told.startswith("memory is not short")
    assert told.endswith("more of it would save nothing")


def test_memory_that_would_save_nothing_is_not_told_to_be_short():
    planned = planned_for("vgg16_10")
    assert planned.bound_s == pytest.approx(profiles()["vgg16_10"].compute_s, rel=1e-3)
    assert "not short" in explain(planned, profiles()["vgg16_10"]).memory


def test_where_most_is_kept_is_where_the_curve_is_highest():
    planned, profile = planned_for("vgg16_10"), profiles()["vgg16_10"]
    curve = Footprints(profile).curve(planned.plan)
    fullest = max(range(len(curve)), key=curve.__getitem__)
    told = explain(planned, profile).memory
    assert f"most is kept in {planned.plan.slots.name(fullest)})" in told


def test_the_verdict_has_time_bound_and_memory():
    planned = planned_for("gpt_80")
    told = explain(planned, profiles()["gpt_80"]).verdict
    assert f"a step takes {planned.step_s * 1e3:.3g} ms" in told
    assert f"{planned.gap:.1%} more than the bound" in told
    assert f"({planned.bound_s * 1e3:.3g} ms)" in told
    assert f"{planned.peak_bytes / 1e9:.3g} GB of {planned.budget / 1e9:.3g} GB" in told


def test_who_is_used_again_is_told_to_be_kept_for_that():
    profile = small_profile(used_often=True)
    planned = make_plan(profile, 1 << 30, Allowed(shardings=(Sharding.ZERO2,)))
    for row in explain(planned, profile).rows:
        assert row[-1].startswith("used again after its own forward")


def test_what_is_never_gathered_is_not_told_to_be():
    profile = small_profile()
    planned = make_plan(profile, 1 << 30, Allowed(shardings=(Sharding.DP,)))
    assert not any("gathered" in row[-1] for row in explain(planned, profile).rows)


def test_what_keeps_less_where_memory_is_short_is_not_told_to_keep_more():
    # While the last unit runs backward zero2 has its own chunk beside whole parameters, sdp has
    # the whole only: less.
    profile = small_profile(activation_bytes=10_000_000)
    planned = make_plan(profile, 1 << 30, Allowed(shardings=(Sharding.SDP,)))
    told = explain(planned, profile)
    assert "most is kept in b2" in told.memory
    assert "more than zero2" not in told.rows[-1][-1]
