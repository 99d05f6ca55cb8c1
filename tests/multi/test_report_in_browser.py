"""The report in a real browser: its security policy allows its own script."""

import pytest

from stretto.report.html import write_report
from tests.multi.browser import opened
from tests.unit.report.examples import run

pytestmark = [pytest.mark.multi, pytest.mark.timeout(120)]


def test_a_browser_draws_every_figure(tmp_path):
    page = tmp_path / "report.html"
    write_report(page, "a report", "two runs", [run("one"), run("two")])
    drawn = opened(page).count('class="main-svg"')
    asked = page.read_text().count("<figure>")
    assert asked >= 5
    assert drawn >= asked
