"""What a test needs of the machine: where that is missing the test is skipped, in CI it fails."""

import os
import shutil

import pytest


def require(*tools: str, root: bool = False, path: str | None = None) -> None:
    """Go on only where the tools are found, and this is root if it must be; CI has all of them.

    ``path`` is where to look, if not in PATH.
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
