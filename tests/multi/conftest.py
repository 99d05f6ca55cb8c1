"""What the tests of real launchers share: a Slurm of two nodes, and what to do without one."""

import os
import shutil

import pytest

from tests.multi.slurm_cluster import missing_tools, running_slurm


def require(what: str, missing: list[str]) -> None:
    """Skip where a launcher is not installed; in CI, which installs it, that is a failure."""
    if not missing:
        return
    text = f"{what} is not installed ({', '.join(missing)}): see .ci/run"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    require("Slurm", missing_tools())
    if os.geteuid():
        require("Slurm", ["root"])
    with running_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def mpirun():
    require("Open MPI", [] if shutil.which("mpirun") else ["mpirun"])
    return ["mpirun", "--allow-run-as-root", "--oversubscribe"]
