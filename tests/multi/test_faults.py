"""Ranks that hang, launchers that die: a few of the many that ``make campaign`` tries."""

import pytest

from benchmarks import launcher_kills, rank_stops

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]


def test_a_killed_launcher_leaves_no_process():
    trials = list(launcher_kills.campaign(count=2, seed=11))
    assert [trial.alive_after_5_s for trial in trials] == [0, 0]
    # The second kill is in mid-training: ranks and their decoders were there.
    assert trials[1].processes_before > 4


def test_a_rank_that_hangs_is_named_in_time():
    (trial,) = rank_stops.campaign(count=1, seed=11)
    assert trial.passed, trial
