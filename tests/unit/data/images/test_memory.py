"""Memory limits of control groups, read from ordinary files."""

import sys
from pathlib import Path

import pytest

from stretto.data.images.cache import cgroup_memory_left
from tests.unit.data.images.pictures import fill


def host(root: Path, groups: str, files: dict[str, object]) -> Path:
    """Make a host on which this process is in ``groups``; ``files`` are below the mount."""
    there = {f"sys/fs/cgroup/{name}": f"{text}\n".encode() for name, text in files.items()}
    return fill(root, there | {"proc/self/cgroup": groups.encode()})


def v2(root, **limits):
    """Make a job with limits from its slice down to a step; double underscores separate folders."""
    used = {"": 100, "slurm": 80, "slurm/job": 60, "slurm/job/step": 50}
    files = {}
    for name, limit in limits.items():
        group = name.replace("__", "/")
        files |= {f"{group}/memory.max": limit, f"{group}/memory.current": used[group]}
    return host(root, "0::/slurm/job/step\n", files)


def test_a_host_without_control_groups_sets_no_limit(tmp_path):
    assert cgroup_memory_left(tmp_path) == sys.maxsize


def test_the_memory_left_is_limit_minus_usage(tmp_path):
    assert cgroup_memory_left(v2(tmp_path, slurm__job__step=70)) == 20


def test_max_means_no_limit(tmp_path):
    assert cgroup_memory_left(v2(tmp_path, slurm__job__step="max", slurm="max")) == sys.maxsize


@pytest.mark.parametrize("where", ["slurm", "slurm__job", "slurm__job__step"])
def test_the_tightest_limit_of_all_parents_counts(tmp_path, where):
    wide = {"slurm": 1080, "slurm__job": 1060, "slurm__job__step": 1050}
    tight = {"slurm": 87, "slurm__job": 67, "slurm__job__step": 57}
    assert cgroup_memory_left(v2(tmp_path, **wide | {where: tight[where]})) == 7


def test_the_limit_of_a_sibling_group_does_not_count(tmp_path):
    root = v2(tmp_path, slurm__job=160)
    fill(root, {f"sys/fs/cgroup/slurm/other/memory.{n}": b"1" for n in ("max", "current")})
    assert cgroup_memory_left(root) == 100


def test_more_usage_than_the_limit_leaves_nothing(tmp_path):
    assert cgroup_memory_left(v2(tmp_path, slurm__job=10)) == 0


def test_reclaimable_page_cache_counts_as_free(tmp_path):
    root = v2(tmp_path, slurm__job=60)
    stat = b"anon 15\nfile 45\nshmem 20\ninactive_file 20\nactive_file 5\n"
    fill(root, {"sys/fs/cgroup/slurm/job/memory.stat": stat})
    assert cgroup_memory_left(root) == 25


def test_a_container_that_sees_its_own_group_as_root_has_its_limit(tmp_path):
    files = {"memory.max": 1000, "memory.current": 400}
    assert cgroup_memory_left(host(tmp_path / "a", "0::/\n", files)) == 600
    assert cgroup_memory_left(host(tmp_path / "b", "0::/docker/of/the/host\n", files)) == 600


V1 = "9:name=systemd:/x\n4:hugetlb,memory:/slurm/job\n1:cpu:/y\n0::/\n"


def test_cgroup_v1_is_supported(tmp_path):
    files = {
        "memory/slurm/memory.limit_in_bytes": 9223372036854771712,  # as it writes "none"
        "memory/slurm/memory.usage_in_bytes": 900,
        "memory/slurm/job/memory.limit_in_bytes": 1000,
        "memory/slurm/job/memory.usage_in_bytes": 800,
        "memory/slurm/job/memory.stat": "inactive_file 1\ntotal_inactive_file 30",
        "memory/y/memory.limit_in_bytes": 1,  # the group of another controller
        "memory/y/memory.usage_in_bytes": 1,
    }
    assert cgroup_memory_left(host(tmp_path, V1, files)) == 230


def test_cgroup_v1_in_a_container_has_its_limit_at_the_mount(tmp_path):
    files = {"memory/memory.limit_in_bytes": 1000, "memory/memory.usage_in_bytes": 999}
    assert cgroup_memory_left(host(tmp_path, V1, files)) == 1


def test_the_limit_of_this_host_can_be_read():
    assert cgroup_memory_left() >= 0
