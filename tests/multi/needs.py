"""Requirements of tests: if a tool is missing, a test is skipped, but fails in CI."""

import os
import shutil

import pytest


def require(*tools: str, root: bool = False, path: str | None = None) -> None:
    """Skip the test if a tool or root is missing; in CI, fail it.

    Args:
        tools: The commands that the test needs.
        root: Whether the test needs root.
        path: Where to look for the tools; None: in PATH.
    """
    missing = [tool for tool in tools if shutil.which(tool, path=path) is None]
    if root and os.geteuid():
        missing.append("root")
    if not missing:
        return
    reason = f"missing here: {', '.join(missing)}; .ci/run installs what tests need"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
