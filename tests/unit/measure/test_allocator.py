"""Profiles say what an allocator takes, where it takes more than it is asked for."""

from stretto.measure.allocator import as_taken
from stretto.plan.profile import Link, Profile, UnitCost

UNIT = UnitCost(name="a", numel=10, forward_s=1, backward_s=2, activation_bytes=1000)
PROFILE = Profile(units=(UNIT,), link=Link(ranks=2, bytes_per_s=1e9), other_bytes=2000)


def test_on_a_cpu_it_takes_what_it_is_asked_for():
    assert as_taken(PROFILE, "cpu") is PROFILE


def test_on_a_gpu_there_are_holes_and_workspaces_but_a_step_takes_as_long():
    taken = as_taken(PROFILE, "cuda")
    assert taken.units[0].activation_bytes == 1100
    assert taken.other_bytes > 2200
    assert taken.holes == 0.1
    assert taken.compute_s == PROFILE.compute_s
