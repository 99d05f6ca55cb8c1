"""Run a real browser (headless Chromium)."""

import subprocess
from pathlib import Path

from tests.multi.needs import require

_FLAGS = [
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


def opened(page: Path) -> str:
    """Return the DOM of ``page`` after its scripts have run."""
    require("chromium")
    done = subprocess.run(
        ["chromium", *_FLAGS, f"--user-data-dir={page.parent / 'profile'}", page.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return done.stdout
