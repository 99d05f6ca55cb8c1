"""Timing training steps in turn: where the clock runs, and who waits for what."""

import time

from stretto.comm.local import run_local
from stretto.measure.interleave import interleave_steps


class Lingering:
    """Sleeps at the first step after a rest, and while it rests: neither is to be counted."""

    def __init__(self):
        self.steps, self.rests, self.fresh = 0, 0, True

    def __call__(self):
        time.sleep(0.05 if self.fresh else 0.001)
        self.steps, self.fresh = self.steps + 1, False

    def rest(self):
        time.sleep(0.05)
        self.rests, self.fresh = self.rests + 1, True

    def close(self):
        pass


def test_only_steps_in_their_stride_are_timed():
    def work(channel):
        contenders = {"a": Lingering(), "b": Lingering()}
        times = interleave_steps(contenders, channel, runs=2)
        return times, [(c.steps, c.rests) for c in contenders.values()]

    (times, counts), (others, _) = run_local(2, work)
    assert times == others
    assert all(len(t) == 2 and max(t) < 0.02 for t in times.values())
    assert counts == [(9, 3), (9, 3)]  # a round before the first is not counted


def test_a_whole_period_may_be_timed_as_one():
    def work(channel):
        lingering = Lingering()
        interleave_steps({"a": lingering}, channel, runs=2, steps=5)
        return lingering.steps, lingering.rests

    assert run_local(2, work) == [(18, 3)] * 2  # one to begin with in each round
