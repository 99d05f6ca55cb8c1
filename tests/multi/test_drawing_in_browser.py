"""A drawn schedule in a real browser: every arrow and label is visible."""

import json
import re
from html import unescape

import pytest

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import ALLREDUCE
from stretto.report.schedule_diagram import make_diagram
from stretto.report.schedule_svg import draw_svg
from tests.multi.browser import opened

pytestmark = [pytest.mark.multi, pytest.mark.timeout(120)]

LOOK = """
const frame = document.querySelector("svg").getBoundingClientRect();
const inside = box => box.left >= frame.left && box.right <= frame.right
  && box.top >= frame.top && box.bottom <= frame.bottom;
const seen = chosen => [...document.querySelectorAll(chosen)].filter(element => {
  const box = element.getBoundingClientRect();
  const style = getComputedStyle(element);
  const paint = element.tagName === "text" ? style.fill : style.stroke;
  return box.width > 2 && box.height > 2 && inside(box) && paint !== "none"
    && style.visibility === "visible";
});
const colours = lines => new Set(lines.map(line => getComputedStyle(line).stroke)).size;
const arrows = seen(".message line");
document.body.dataset.seen = JSON.stringify({
  arrows: arrows.length,
  labels: seen("text.label").length,
  texts: seen("text").length === document.querySelectorAll("text").length,
  colours: colours(arrows),
});
"""


def looked_at(svg: str, folder) -> dict[str, object]:
    page = folder / "page.html"
    page.write_text(f"<!doctype html><body>{svg}<script>{LOOK}</script></body>")
    return json.loads(unescape(re.search(r'data-seen="([^"]*)"', opened(page))[1]))


def test_a_browser_shows_every_arrow_and_label_in_the_colour_of_its_lane(tmp_path):
    mesh = Mesh((2, 2))
    shown = make_diagram(ALLREDUCE["hierarchical"](mesh, 2), mesh, "allreduce")
    assert looked_at(draw_svg(shown), tmp_path) == {
        "arrows": len(shown.messages),
        "labels": len(shown.messages),
        "texts": True,
        "colours": 3,
    }


def test_a_browser_opens_the_file_itself_without_complaint(tmp_path):
    mesh = Mesh((4,))
    file = tmp_path / "ring.svg"
    file.write_text(draw_svg(make_diagram(ALLREDUCE["ring"](mesh, 1), mesh, "allreduce")))
    document = opened(file)
    assert "parsererror" not in document
    assert document.count('class="message"') == 24
