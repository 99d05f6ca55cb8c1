"""The page of a plan in a real browser: its security policy allows its own script."""

import pytest

from stretto.report.plan_page import write_plan_page
from tests.multi.browser import opened
from tests.unit.report.test_plan_page import page_of

pytestmark = [pytest.mark.multi, pytest.mark.timeout(120)]


def test_a_browser_draws_every_figure_and_every_bar(tmp_path):
    page = tmp_path / "plan.html"
    write_plan_page(page, page_of())
    seen = opened(page)
    assert page.read_text().count("<figure>") == 3
    assert seen.count('class="main-svg"') >= 3
    assert seen.count('class="point"') >= 3 + 3 + 4 * 7
