"""`HeartbeatMonitor` finds silent ranks, with heartbeats and a clock that the test provides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.cluster.heartbeats import HEARTBEAT_INTERVAL_S, SILENCE_WARNING_S, HeartbeatMonitor


class MonitoredRanks:
    """A monitor whose peers send a heartbeat each second except while they hang."""

    def __init__(self, rank, size, heartbeat_timeout_s=30.0):
        self.monitor = HeartbeatMonitor(rank, size, heartbeat_timeout_s)
        self.now_s = 0.0
        self.lines = []
        self.failure_report = None
        self.counts = dict.fromkeys(range(size), 0)

    def run(self, seconds, hanging=(), step_s=HEARTBEAT_INTERVAL_S):
        for _ in range(int(seconds / step_s)):
            self.now_s += step_s
            for rank in self.counts:
                self.counts[rank] += rank not in hanging
            polled_ranks = self.monitor.ranks_to_poll()
            observation = self.monitor.observe(
                {r: f"{self.counts[r]} 17" for r in polled_ranks}, self.now_s
            )
            self.lines += observation.lines
            self.failure_report = self.failure_report or observation.failure_report
        return self


def test_a_rank_that_hangs_is_named_by_the_next_rank_with_its_last_step():
    ranks = MonitoredRanks(3, 4).run(5).run(8, hanging=[2])
    assert ranks.lines == ["rank 2 silent for 4 s, last heartbeat at step 17; the others wait"]


@given(st.integers(2, 9), st.data())
def test_only_the_rank_that_hangs_is_named_in_time(size, data):
    hanging = data.draw(st.integers(0, size - 1))
    monitors = [MonitoredRanks(rank, size).run(3).run(9, hanging=[hanging]) for rank in range(size)]
    del monitors[hanging]
    named = [line for monitor in monitors for line in monitor.lines]
    assert [line.split(" silent")[0] for line in named] == [f"rank {hanging}"]


def test_all_ranks_of_a_host_that_hangs_are_named():
    ranks = MonitoredRanks(8, 12).run(3).run(9, hanging=[4, 5, 6, 7])
    assert ranks.lines[-1].startswith("ranks 4-7 silent")


def test_a_short_pause_is_not_logged():
    ranks = (
        MonitoredRanks(1, 2)
        .run(5)
        .run(SILENCE_WARNING_S - HEARTBEAT_INTERVAL_S, hanging=[0])
        .run(5)
    )
    assert ranks.lines == []


def test_a_rank_whose_heartbeats_are_back_is_logged():
    ranks = MonitoredRanks(1, 2).run(5).run(8, hanging=[0]).run(3)
    assert ranks.lines[-1] == "rank 0: heartbeats are back"
    assert ranks.failure_report is None


def test_a_rank_that_is_silent_for_the_timeout_is_reported_as_failed():
    ranks = MonitoredRanks(1, 3, heartbeat_timeout_s=12).run(5).run(14, hanging=[0])
    assert (ranks.failure_report.rank, ranks.failure_report.kind) == (0, "silent")
    assert "silent for 12 s" in ranks.failure_report.reason


def test_a_monitor_that_was_paused_reports_no_rank():
    ranks = MonitoredRanks(1, 3).run(5)
    ranks.now_s += 60  # stopped, or its machine slept
    ranks.run(5)
    assert (ranks.lines, ranks.failure_report) == ([], None)


@pytest.mark.parametrize("size", [2, 5, 1000])
def test_a_rank_polls_one_rank_while_no_rank_is_silent(size):
    ranks = MonitoredRanks(0, size).run(4)
    assert ranks.monitor.ranks_to_poll() == [size - 1]
