"""The explanation of a plan: a reason for every unit, and the value of memory."""

import re
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.profiles import profiles
from stretto.planner.explain import GIB, HEADERS, explain, ms_per_gib
from stretto.planner.memory import Footprints
from stretto.planner.milp import MilpModel
from stretto.planner.plan import Sharding
from stretto.planner.planner import make_plan, solver_arrays
from stretto.planner.presets import PresetOptions, preset_plan
from stretto.planner.profile import Link, Profile, UnitCost
from stretto.planner.solver import Solver
from stretto.planner.unit_choices import PlanConstraints, all_options

pytestmark = pytest.mark.usefixtures("kept_solvers")


@cache
def middle_of(name):
    """Return the mean of the memory of zero3 and of zero2."""
    profile = profiles()[name]
    preset_settings = {
        "zero3": PresetOptions(1, 1, barrier=True),
        "zero2": PresetOptions(1, barrier=True),
    }
    plans = [
        preset_plan(preset, profile.shapes, preset_options)
        for preset, preset_options in preset_settings.items()
    ]
    return sum(map(Footprints(profile).peak, plans)) // 2


@cache
def planned_for(name):
    return make_plan(profiles()[name], middle_of(name))


def small_profile(rate=1e9, **unit):
    costs = {"numel": 100_000, "forward_s": 1.0, "backward_s": 2.0, **unit}
    units = [UnitCost(name=f"u{i}", **costs) for i in range(3)]
    return Profile(units=tuple(units), link=Link(ranks=2, bytes_per_s=rate), state_bytes=8)


def lp_bound_s(profile, memory_limit):
    """Return the bound of the continuous relaxation, with every unit in a group of its own."""
    options = all_options(profile, PlanConstraints(), Footprints(profile))
    groups = [range(i, i + 1) for i in range(len(options))]
    problem = MilpModel(profile, options, groups, PlanConstraints()).problem(memory_limit)
    with Solver() as solver:
        return (
            problem.base_s + solver.solve(solver_arrays(problem), integral=False, limit_s=20).bound
        )


@pytest.mark.parametrize("name", ["gpt_80", "vgg16_10"])
def test_every_unit_has_a_row_and_a_reason(name):
    planned, profile = planned_for(name), profiles()[name]
    rows = explain(planned, profile).rows
    assert [row[0] for row in rows] == [unit.name for unit in profile.units]
    for row, unit in zip(rows, planned.plan.units, strict=True):
        shown = dict(zip(HEADERS, row, strict=True))
        assert shown["kept as"].split(", ")[0] == unit.sharding
        assert shown["blocks"] == str(len(unit.blocks))
        assert len(shown["why"]) > 20


def test_reasons_match_the_sharding_of_each_unit():
    planned = planned_for("gpt_80")
    rows = explain(planned, profiles()["gpt_80"]).rows
    begins = {Sharding.ZERO3: "resharded after forward", Sharding.ZERO2: "kept until backward"}
    for row, unit in zip(rows[:-1], planned.plan.units[:-1], strict=True):
        assert row[-1].startswith(begins[unit.sharding])
    assert rows[-1][-1].startswith("backward begins with it")


def test_units_that_are_unsharded_again_show_bytes_and_seconds():
    # Two bytes for each of 12 * 4096^2 weights are 403 MB; the rank's own eighth lies beside them
    # in 32 bits, so all 403 MB are freed. The unshard takes 7/8 of 403 MB at 80 GB/s, and 0.02 ms.
    rows = explain(planned_for("gpt_80"), profiles()["gpt_80"]).rows
    freed = [row for row in rows if row[2] == "zero3" and row[0].startswith("block")]
    assert freed
    for row in freed:
        assert row[1] == "403 MB"
        assert "unsharded again for 4.42 ms of the link, which frees 403 MB in b25" in row[-1]


def test_the_dual_of_memory_is_what_a_little_more_of_it_saves():
    planned, profile = planned_for("gpt_80"), profiles()["gpt_80"]
    memory_limit, more = planned.memory_limit, planned.memory_limit // 100
    saved_s = lp_bound_s(profile, memory_limit) - lp_bound_s(profile, memory_limit + more)
    assert saved_s > 1e-3
    assert ms_per_gib(planned) * more / GIB * 1e-3 == pytest.approx(saved_s, rel=0.05)


def test_short_memory_is_reported_with_its_slot_and_value():
    planned = planned_for("gpt_80")
    memory = explain(planned, profiles()["gpt_80"]).memory
    dearest = max(range(len(planned.duals)), key=planned.duals.__getitem__)
    where, worth = re.fullmatch(
        r"memory is short in (\w+): 1 % more .* a step, ([\d.]+) ms a GiB", memory
    ).groups()
    assert where == planned.plan.slots.name(dearest)
    assert float(worth) == pytest.approx(ms_per_gib(planned), abs=0.06)


def test_ample_memory_is_reported():
    profile = small_profile()
    planned = make_plan(profile, 1 << 30)
    assert ms_per_gib(planned) == pytest.approx(0, abs=1e-3)
    memory = explain(planned, profile).memory
    assert memory.startswith("memory is not short")
    assert memory.endswith("more of it would save nothing")


def test_memory_that_would_save_nothing_is_not_reported_as_short():
    planned = planned_for("vgg16_10")
    assert planned.bound_s == pytest.approx(profiles()["vgg16_10"].compute_s, rel=1e-3)
    assert "not short" in explain(planned, profiles()["vgg16_10"]).memory


def test_the_fullest_slot_is_that_of_the_highest_curve_value():
    planned, profile = planned_for("vgg16_10"), profiles()["vgg16_10"]
    curve = Footprints(profile).curve(planned.plan)
    fullest = max(range(len(curve)), key=curve.__getitem__)
    memory = explain(planned, profile).memory
    assert f"most is kept in {planned.plan.slots.name(fullest)})" in memory


def test_the_summary_has_time_bound_and_memory():
    planned = planned_for("gpt_80")
    above_bound = replace(planned, bound_s=planned.step_s / 1.25)
    line = explain(above_bound, profiles()["gpt_80"]).summary_line
    assert f"a step takes {planned.step_s * 1e3:.3g} ms" in line
    assert f"no plan can take less than {planned.step_s / 1.25 * 1e3:.3g} ms" in line
    assert "this one takes 25.0% more" in line
    assert f"{planned.peak_bytes / 1e9:.3g} GB of {planned.memory_limit / 1e9:.3g} GB" in line


def test_the_summary_of_a_plan_at_its_bound_says_only_that():
    planned = planned_for("gpt_80")
    line = explain(replace(planned, bound_s=planned.step_s), profiles()["gpt_80"]).summary_line
    assert f"a step takes {planned.step_s * 1e3:.3g} ms, and no plan can take less;" in line
    assert "more" not in line


def test_units_used_often_are_explained_as_such():
    profile = small_profile(used_often=True)
    planned = make_plan(profile, 1 << 30, PlanConstraints(shardings=(Sharding.ZERO2,)))
    for row in explain(planned, profile).rows:
        assert row[-1].startswith("used again after its own forward")


def test_dp_units_are_not_explained_as_unsharded():
    profile = small_profile()
    planned = make_plan(profile, 1 << 30, PlanConstraints(shardings=(Sharding.DP,)))
    assert not any("unsharded" in row[-1] for row in explain(planned, profile).rows)


def test_a_unit_that_keeps_less_is_not_explained_as_keeping_more():
    # During the backward of the last unit, zero2 keeps its own chunk beside whole parameters. sdp
    # keeps only the whole parameters, which is less.
    profile = small_profile(activation_bytes=10_000_000)
    planned = make_plan(profile, 1 << 30, PlanConstraints(shardings=(Sharding.SDP,)))
    explanation = explain(planned, profile)
    assert "most is kept in b2" in explanation.memory
    assert "more than zero2" not in explanation.rows[-1][-1]
