"""Who is silent: judged from beats and a clock that the test moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.cluster.beats import BEAT_S, NAMED_AFTER_S, Watch


class Play:
    """A watch whose fellows beat each second except while they hang."""

    def __init__(self, rank, size, silence_s=30.0):
        self.watch = Watch(rank, size, silence_s)
        self.now_s = 0.0
        self.lines = []
        self.verdict = None
        self.counts = dict.fromkeys(range(size), 0)

    def run(self, seconds, hanging=(), step_s=BEAT_S):
        for _ in range(int(seconds / step_s)):
            self.now_s += step_s
            for rank in self.counts:
                self.counts[rank] += rank not in hanging
            asked = self.watch.asks()
            told = self.watch.hear({r: f"{self.counts[r]} 17" for r in asked}, self.now_s)
            self.lines += told.lines
            self.verdict = self.verdict or told.verdict
        return self


def test_one_that_hangs_is_named_by_the_next_with_its_last_step():
    play = Play(3, 4).run(5).run(8, hanging=[2])
    assert play.lines == ["rank 2 silent for 4 s, last heard of at step 17; the others wait"]


@given(st.integers(2, 9), st.data())
def test_whoever_hangs_is_named_in_time_and_nobody_else(size, data):
    hanging = data.draw(st.integers(0, size - 1))
    watchers = [Play(rank, size).run(3).run(9, hanging=[hanging]) for rank in range(size)]
    del watchers[hanging]
    named = [line for watcher in watchers for line in watcher.lines]
    assert [line.split(" silent")[0] for line in named] == [f"rank {hanging}"]


def test_a_whole_host_that_hangs_is_named_whole():
    play = Play(8, 12).run(3).run(9, hanging=[4, 5, 6, 7])
    assert play.lines[-1].startswith("ranks 4-7 silent")


def test_a_short_stop_is_not_worth_a_word():
    play = Play(1, 2).run(5).run(NAMED_AFTER_S - BEAT_S, hanging=[0]).run(5)
    assert play.lines == []


def test_one_that_comes_back_is_welcomed():
    play = Play(1, 2).run(5).run(8, hanging=[0]).run(3)
    assert play.lines[-1] == "rank 0: heard of again"
    assert play.verdict is None


def test_after_enough_silence_a_rank_is_given_up():
    play = Play(1, 3, silence_s=12).run(5).run(14, hanging=[0])
    assert (play.verdict.rank, play.verdict.kind) == (0, "silent")
    assert "silent for 12 s" in play.verdict.reason


def test_a_watcher_that_was_away_itself_blames_nobody():
    play = Play(1, 3).run(5)
    play.now_s += 60  # stopped, or its machine slept
    play.run(5)
    assert (play.lines, play.verdict) == ([], None)


@pytest.mark.parametrize("size", [2, 5, 1000])
def test_while_all_is_well_a_rank_asks_for_one_beat_a_second(size):
    play = Play(0, size).run(4)
    assert play.watch.asks() == [size - 1]
