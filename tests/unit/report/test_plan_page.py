"""The page of a plan is complete, self-contained, and safe from names of units."""

import json
import re
import unicodedata
from functools import cache

import pytest

from stretto.errors import ConfigError
from stretto.planner.memory import Footprints
from stretto.planner.presets import PresetOptions, UnitShape, preset_plan, random_plan
from stretto.planner.profile import Link, Profile, UnitCost
from stretto.planner.timing import time_plan
from stretto.report.plan_page import PlanPage, render_plan_page, timeline_figure, write_plan_page
from tests.unit.report.hostile import HOSTILE
from tests.unit.report.test_html import Page, without_plotly

pytestmark = pytest.mark.usefixtures("kept_solvers")

NAMES = ("in", "mid", "out")


def profile_of(names=NAMES):
    units = [
        UnitCost(
            name=name,
            numel=1000 * (index + 1),
            forward_s=1.0,
            backward_s=2.0,
            activation_bytes=5000,
        )
        for index, name in enumerate(names)
    ]
    return Profile(units=tuple(units), link=Link(ranks=2, bytes_per_s=1500.0), state_bytes=8)


def page_of(names=NAMES, title="A plan", summary_line="It fits.", **more):
    profile = profile_of(names)
    plan = preset_plan("zero3", profile.shapes, PresetOptions(prefetch=1, block=1500))
    filled = {
        "headers": ["unit", "elements", "sharding"],
        "rows": [[unit.name, str(unit.numel), unit.sharding.value] for unit in plan.units],
        "pareto": [(60_000, 30.0), (90_000, 20.0)],
        **more,
    }
    return PlanPage(title, summary_line, profile, plan, memory_limit=80_000, **filled)


@cache
def named(name):
    """Return a page in which everything with a name is called ``name``."""
    table = {"headers": [name] * 3, "rows": [[name] * 3]}
    page = page_of([name] * 3, title=name, summary_line=name, **table)
    return without_plotly(render_plan_page(page))


def figures(text):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    blocks = [body for kind, body in Page(text).scripts if kind == "application/json"]
    return [json.loads(block, parse_constant=refuse) for block in blocks]


@pytest.fixture(scope="module")
def whole_page():
    return without_plotly(render_plan_page(page_of()))


@pytest.mark.parametrize(
    "fact", ["A plan", "It fits.", "One step", "Memory", "Time against memory", "elements", "2000"]
)
def test_the_page_has_every_fact(whole_page, fact):
    assert fact in Page(whole_page).text


def test_every_figure_has_a_place_a_caption_and_its_data(whole_page):
    tags = [tag for tag, _ in Page(whole_page).tags]
    assert tags.count("figure") == tags.count("figcaption") == len(figures(whole_page)) == 3


def test_an_empty_curve_and_table_are_left_out():
    text = without_plotly(render_plan_page(page_of(headers=(), rows=(), pareto=())))
    assert len(figures(text)) == 2
    assert "Time against memory" not in text
    assert "<table>" not in text


def test_numbers_are_right_aligned_and_names_left_aligned(whole_page):
    assert '<th scope="col" class="n">elements</th>' in whole_page
    assert '<td class="n">2000</td><td class="">zero3</td>' in whole_page
    assert '<th scope="col" class="">unit</th>' in whole_page


def test_the_time_line_has_every_slot_and_every_block(whole_page):
    step, page = figures(whole_page)[0], page_of()
    bars = {trace["name"]: trace for trace in step["data"]}
    assert len(bars["forward"]["x"]) == len(bars["backward"]["x"]) == 3
    assert sum(bars["forward"]["x"]) == pytest.approx(3 * 1000)
    blocks = {text.split(", from")[0] for text in bars["reduce"]["text"]}
    assert blocks == {
        f"{unit.name}, block {block + 1} of {len(unit.blocks)}"
        for unit in page.plan.units
        for block in range(len(unit.blocks))
    }
    assert step["layout"]["yaxis"]["ticktext"] == [
        "compute",
        "reduce",
        "unshard",
        "unshard_for_backward",
    ]


@pytest.mark.parametrize("seed", range(12))
def test_exactly_one_step_is_drawn(seed):
    profile = profile_of()
    plan = random_plan([UnitShape(unit.name, unit.numel) for unit in profile.units], seed)
    timed = time_plan(plan, profile)
    bars = {trace["name"]: trace for trace in timeline_figure(plan, timed).traces}
    for trace in bars.values():
        ends = [base + x for base, x in zip(trace["base"], trace["x"], strict=True)]
        assert min(trace["base"]) >= 0
        assert max(ends) <= timed.step_s * 1e3 + 1e-3
    sent_s = sum(
        sum(bars[what]["x"])
        for what in ("reduce", "unshard", "unshard_for_backward")
        if what in bars
    )
    assert sent_s == pytest.approx(1e3 * profile.link_s(plan), rel=1e-3)
    filled_s = sum(sum(trace["x"]) for trace in bars.values() if set(trace["y"]) == {0})
    assert filled_s == pytest.approx(1e3 * timed.step_s, rel=1e-3)
    assert sum(bars["waits"]["x"]) == pytest.approx(1e3 * timed.waited_s, rel=1e-3)


def test_memory_is_stacked_to_the_curve_under_the_limit(whole_page):
    page = page_of()
    *parts, memory_limit = figures(whole_page)[1]["data"]
    curve = Footprints(page.profile).curve(page.plan)
    stacked = [sum(slot) for slot in zip(*(part["y"] for part in parts), strict=True)]
    assert stacked == pytest.approx([kept / 1e3 for kept in curve])
    assert memory_limit["y"] == [80.0, 80.0]


def test_this_plan_is_marked_among_the_best(whole_page):
    page = page_of()
    curve, _, here = figures(whole_page)[2]["data"]
    assert curve["x"] == [60.0, 90.0]
    assert curve["y"] == [30_000.0, 20_000.0]
    assert here["y"] == [pytest.approx(1e3 * time_plan(page.plan, page.profile).step_s)]


def test_a_profile_of_another_model_is_refused():
    page = page_of()
    other = PlanPage("t", "v", profile_of(["a", "b", "c"]), page.plan, page.memory_limit)
    with pytest.raises(ConfigError, match="of another model"):
        render_plan_page(other)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_only_text(name):
    text = named(name)
    assert Page(text).tags == Page(named("harmless")).tags
    assert {c for c in text if unicodedata.category(c) in {"Cc", "Cf"}} <= {"\n"}
    for figure in figures(text):
        labels = json.dumps(figure)
        for ours in ("<extra></extra>", "<extra>this plan</extra>"):
            labels = labels.replace(ours, "")
        assert "<" not in labels


def test_the_policy_allows_nothing_but_the_two_scripts(whole_page):
    policies = [value for _, name, value in Page(whole_page).attributes if name == "content"]
    (policy,) = [each for each in policies if "default-src 'none'" in each]
    assert policy.count("sha256-") == 2
    assert not re.search(r"https?://|url\(|@import", whole_page)


def test_a_written_page_is_the_rendered_one(tmp_path):
    write_plan_page(tmp_path / "out" / "plan.html", page_of())
    assert (tmp_path / "out" / "plan.html").read_text() == render_plan_page(page_of())
