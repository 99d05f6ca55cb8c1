"""A job that is killed at any step and resumed ends with the same bits as an undisturbed one."""

import pytest

from benchmarks.resume_kills import STEPS, campaign

pytestmark = [pytest.mark.multi, pytest.mark.timeout(400)]


def test_kills_at_random_steps_change_nothing():
    trials = list(campaign(count=2, seed=11))
    assert [trial.equal for trial in trials] == [True] * 2
    # The kills had an effect: steps were lost, and the run resumed from a checkpoint.
    assert all(0 <= trial.resumed_at_step < STEPS for trial in trials)
    assert any(trial.resumed_at_step > 0 for trial in trials)
