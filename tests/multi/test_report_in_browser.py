"""The report in a real browser: its own policy lets its own script draw, and nothing else."""

import subprocess

import pytest

from stretto.report.html import write_report
from tests.multi.needs import require
from tests.unit.report.made_up import run

pytestmark = [pytest.mark.multi, pytest.mark.timeout(120)]

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=10000",
    "--dump-dom",
]


def test_a_browser_draws_every_figure(tmp_path):
    require("chromium")
    page = tmp_path / "report.html"
    write_report(page, "a report", "two runs", [run("one"), run("two")])
    done = subprocess.run(
        ["chromium", *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    drawn = done.stdout.count('class="main-svg"')
    asked = page.read_text().count("<figure>")
    assert asked >= 5
    assert drawn >= asked
