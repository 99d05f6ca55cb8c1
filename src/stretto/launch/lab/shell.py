"""Run the system's network tools, and say what is missing where they cannot be run."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from stretto.errors import LabError
from stretto.launch.lab.plan import LabSpec
from stretto.launch.processes import guarded

_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "setpriv": "util-linux",
    "taskset": "util-linux",
}


def require_tools(spec: LabSpec) -> None:
    """Raise a `LabError` that tells what is missing here, and what to do, unless nothing is."""
    if not sys.platform.startswith("linux"):
        raise LabError(f"a lab needs Linux's network namespaces, and this is {sys.platform}")
    needed = ["ip", "tc", "setpriv", "taskset", *(["nft"] if spec.loss else [])]
    missing = [tool for tool in needed if shutil.which(tool) is None]
    if missing:
        packages = " ".join(sorted({_PACKAGES[tool] for tool in missing}))
        raise LabError(
            f"a lab needs {', '.join(missing)}, not found on PATH; install with: "
            f"apt-get install {packages}"
        )
    if os.geteuid() != 0:
        raise LabError("a lab makes network namespaces, which only root may; run it as root")


def run_tool(argv: Sequence[str], *, lock_fd: int | None = None) -> str:
    """Run one command to its end and return what it printed; a failure is a `LabError`.

    The command dies with us, and holds the lab's lock while it runs: a lab killed in the middle of
    a command does not count as dead while that command may still make something. A session of its
    own keeps the terminal's Ctrl-C, meant for us, from breaking it in the middle.
    """
    done = subprocess.run(
        guarded(argv),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
        pass_fds=() if lock_fd is None else (lock_fd,),
    )
    if done.returncode != 0:
        raise LabError(
            f"`{shlex.join(argv)}` failed with exit code {done.returncode}: "
            f"{done.stderr.strip() or 'it said nothing'}; a lab needs root with CAP_SYS_ADMIN and "
            "CAP_NET_ADMIN (in a container: --privileged)"
        )
    return done.stdout
