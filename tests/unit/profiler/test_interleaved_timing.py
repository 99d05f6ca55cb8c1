"""Interleaved timing of training steps: which steps are timed, and which are not."""

import time

from stretto.comm.in_process_transports import run_threads
from stretto.profiler.interleaved_timing import time_steps_interleaved


class Lingering:
    """Sleeps in drain and in the first step after it: neither may be timed."""

    def __init__(self):
        self.steps, self.drains, self.is_drained = 0, 0, True

    def __call__(self):
        time.sleep(0.05 if self.is_drained else 0.001)
        self.steps, self.is_drained = self.steps + 1, False

    def drain(self):
        time.sleep(0.05)
        self.drains, self.is_drained = self.drains + 1, True

    def close(self):
        pass


def test_the_first_step_after_a_drain_and_the_drain_are_not_timed():
    def work(transport):
        runners = {"a": Lingering(), "b": Lingering()}
        times = time_steps_interleaved(runners, transport, runs=2)
        return times, [(runner.steps, runner.drains) for runner in runners.values()]

    (times, counts), (others, _) = run_threads(2, work)
    assert times == others
    assert all(len(t) == 2 and max(t) < 0.02 for t in times.values())
    assert counts == [(9, 3), (9, 3)]  # the warm-up round is not in the times


def test_several_steps_may_be_timed_together():
    def work(transport):
        lingering = Lingering()
        time_steps_interleaved({"a": lingering}, transport, runs=2, steps=5)
        return lingering.steps, lingering.drains

    assert run_threads(2, work) == [(18, 3)] * 2  # each round begins with an untimed step
