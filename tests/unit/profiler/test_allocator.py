"""The overhead of an allocator is added to the bytes of a profile."""

from stretto.planner.profile import Link, Profile, UnitCost
from stretto.profiler.meters import add_allocator_overhead

UNIT = UnitCost(name="a", numel=10, forward_s=1, backward_s=2, activation_bytes=1000)
PROFILE = Profile(units=(UNIT,), link=Link(ranks=2, bytes_per_s=1e9), other_bytes=2000)


def test_an_allocator_on_a_cpu_has_no_overhead():
    assert add_allocator_overhead(PROFILE, "cpu") is PROFILE


def test_a_gpu_allocator_adds_fragmentation_and_workspaces_but_no_time():
    profile = add_allocator_overhead(PROFILE, "cuda")
    assert profile.units[0].activation_bytes == 1100
    assert profile.other_bytes > 2200
    assert profile.allocator_overhead == 0.1
    assert profile.compute_s == PROFILE.compute_s
