"""The page of a report is complete, self-contained, and safe from names of runs."""

import base64
import hashlib
import json
import math
import re
import unicodedata
from functools import cache
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs

from stretto.report.html import render_report, write_report
from stretto.report.run_records import RunRecord
from stretto.telemetry.events import RunStarted
from stretto.telemetry.timeline import Span, Timeline
from tests.unit.report.examples import run, step
from tests.unit.report.hostile import HOSTILE

LOADING = {"src", "href", "srcset", "data", "action", "poster", "background", "formaction"}


class Page(HTMLParser):
    """Parses a page into tags with attributes, text, and scripts with their content."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.scripts, self.text = [], [], [], ""
        self._open = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._open = tag
        if tag == "script":
            self.scripts.append([dict(attrs).get("type"), ""])

    def handle_endtag(self, tag):
        self.tags.append((f"/{tag}", ()))
        self._open = None

    def handle_comment(self, data):
        self.tags.append(("comment", ()))

    def handle_data(self, data):
        if self._open == "script":
            self.scripts[-1][1] += data
        elif self._open != "style":
            self.text += data


def without_plotly(text):
    """Return the page without the five megabytes of plotly.js."""
    return text.replace(get_plotlyjs(), "")


@cache
def named(name):
    """Return a page in which everything with a name is called ``name``."""
    hostile = RunRecord(
        name=name,
        events=[RunStarted(name, 1, 1, name, 2, name, 1, 1, name), step(1), step(2)],
        timelines=[Timeline(0, (Span(name, name, 0.0, 1.0, 1), Span("f", "compute", 0, 1.0, 1)))],
        facts={name: name},
        config_toml=name,
    )
    return without_plotly(render_report(name, name, [hostile, run(name)]))


@pytest.fixture(scope="module")
def whole_page():
    return render_report("Title", "Verdict.", [run("a"), run("b")])


@pytest.fixture(scope="module")
def harmless_tags():
    return Page(named("harmless")).tags


def test_there_are_fifty_different_hostile_names():
    assert len(set(HOSTILE)) == 50


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_changes_no_tag_of_the_page(name, harmless_tags):
    assert Page(named(name)).tags == harmless_tags


@pytest.mark.parametrize("name", HOSTILE)
def test_no_figure_carries_a_tag_of_a_hostile_name(name):
    blocks = [text for kind, text in Page(named(name)).scripts if kind == "application/json"]
    assert blocks
    for block in blocks:
        # The end of plotly's hover labels is the only tag, and it is ours.
        labels = json.dumps(json.loads(block)).replace("<extra></extra>", "")
        assert "<" not in labels


def test_nothing_in_a_figure_could_end_its_block(whole_page):
    blocks = [text for kind, text in Page(whole_page).scripts if kind == "application/json"]
    assert any("extra>" in block for block in blocks)
    assert not any("<" in block for block in blocks)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_control_character_of_a_hostile_name_reaches_the_page(name):
    left = {char for char in named(name) if unicodedata.category(char) in {"Cc", "Cf"}}
    assert left <= {"\n"}


@pytest.mark.parametrize("name", ["<b>x</b>", "{{ 7 * 7 }}", "&lt;"])
def test_a_hostile_name_is_still_shown_as_it_was_written(name):
    assert name in Page(named(name)).text


def test_nothing_in_the_page_loads_anything(whole_page):
    page = Page(without_plotly(whole_page))
    assert [each for each in page.attributes if each[1] in LOADING] == []
    assert not re.search(r"https?://|url\(|@import", without_plotly(whole_page))


def test_the_policy_allows_no_network_and_only_the_two_scripts_of_the_page(whole_page):
    page = Page(whole_page)
    (policy,) = [
        value for tag, name, value in page.attributes if tag == "meta" and "default-src" in value
    ]
    run_scripts = [text for kind, text in page.scripts if kind is None]
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in run_scripts]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert "http" not in policy
    assert "connect-src" not in rules


def test_the_policy_stands_before_anything_it_governs(whole_page):
    assert whole_page.index("Content-Security-Policy") < whole_page.index("<style")


def test_plotly_is_in_the_page_exactly_once(whole_page):
    assert whole_page.count(get_plotlyjs()) == 1


def test_a_report_without_runs_renders_and_says_so():
    assert "There are no runs to show." in render_report("Empty", "", [])


def test_a_run_without_events_renders():
    page = Page(render_report("t", "v", [RunRecord("silent", [])]))
    assert "silent" in page.text
    assert "there are no figures" in page.text


def test_a_report_without_figures_does_not_carry_plotly():
    assert len(render_report("Empty", "", [])) < 50_000


def test_one_run_renders():
    assert "only one" in Page(without_plotly(render_report("t", "v", [run("only one")]))).text


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_leaves_a_gap_in_the_figure(loss):
    text = without_plotly(render_report("t", "v", [run(losses=(1.0, loss, 0.5))]))

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    blocks = [body for kind, body in Page(text).scripts if kind == "application/json"]
    figures = [json.loads(block, parse_constant=refuse) for block in blocks]
    assert figures[0]["data"][0]["y"] == [1.0, None, 0.5]


@pytest.mark.parametrize("fact", ["Verdict.", "Final loss", "Samples/s", 'kind = "cnn"'])
def test_the_page_has_every_fact(whole_page, fact):
    assert fact in Page(without_plotly(whole_page)).text


def test_every_figure_has_a_place_and_a_caption(whole_page):
    tags = [tag for tag, _ in Page(without_plotly(whole_page)).tags]
    assert tags.count("figure") == tags.count("figcaption") == 6


def test_a_written_report_is_the_rendered_one(tmp_path):
    write_report(tmp_path / "out" / "report.html", "t", "v", [])
    assert (tmp_path / "out" / "report.html").read_text() == render_report("t", "v", [])
