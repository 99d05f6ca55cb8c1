"""What the tests of real launchers share: a Slurm of two nodes, and Open MPI."""

import pytest

from tests.multi.needs import require
from tests.multi.slurm_cluster import TOOLS, running_slurm, search_path


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    require(*TOOLS, root=True, path=search_path())
    with running_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def mpirun():
    require("mpirun")
    return ["mpirun", "--allow-run-as-root", "--oversubscribe"]
