"""Computation beside messages, and lines through messages, with sleeps in place of both."""

import time

import pytest

from stretto.comm.local import run_local
from stretto.measure.messages import SIZES, fit_line, measure_line
from stretto.measure.slowdown import Traffic, measure_slowdown


class Wire:
    """Messages of 10 ms each, one after another, on a thread of their own."""

    def __init__(self):
        self.over_s = 0.0
        self.begun = 0

    def start(self):
        self.over_s = max(self.over_s, time.perf_counter()) + 0.01
        self.begun += 1

    def wait(self):
        time.sleep(max(0.0, self.over_s - time.perf_counter()))

    @property
    def busy(self):
        return time.perf_counter() < self.over_s


@pytest.mark.timed
@pytest.mark.parametrize(("factors", "slowdown"), [((1, 1), 1), ((2, 1), 2), ((1, 3), 3)])
def test_the_rank_that_is_slowed_down_most_counts(factors, slowdown):
    def work(channel):
        wire = Wire()

        def step():
            time.sleep(0.02 * (factors[channel.rank] if wire.busy else 1))

        found = measure_slowdown(step, Traffic(wire.start, wire.wait), channel, repeats=3)
        assert not wire.busy
        return found, wire.begun

    results = run_local(2, work)
    assert len({begun for _, begun in results}) == 1, "ranks must begin as many messages"
    for found, _ in results:
        assert found == pytest.approx(slowdown, rel=0.15)


def test_messages_travel_for_as_long_as_a_slow_step_takes():
    wire, seen = Wire(), []

    def step():
        was_busy = wire.busy
        time.sleep(0.01 * (3 if was_busy else 1))
        seen.append((was_busy, wire.busy))

    run_local(1, lambda channel: measure_slowdown(step, Traffic(wire.start, wire.wait), channel))
    assert {still for was, still in seen if was} == {True}


def test_nothing_is_quicker_beside_messages():
    wire = Wire()

    def step():
        time.sleep(0.001 if wire.busy else 0.004)

    factors = run_local(
        1, lambda channel: measure_slowdown(step, Traffic(wire.start, wire.wait), channel)
    )
    assert factors == [1.0]


def test_a_line_is_found_through_what_lies_on_it():
    line = fit_line([(size, 2e-3 + size / 50e6) for size in SIZES])
    assert line.latency_s == pytest.approx(2e-3)
    assert 1 / line.s_per_byte == pytest.approx(50e6)


def test_errors_count_relative_to_the_seconds():
    points = [(size, 1e-3 + size / 1e9) for size in SIZES]
    far_off = [*points[:-1], (SIZES[-1], 1.2 * points[-1][1])]
    line = fit_line(far_off)
    assert line.latency_s == pytest.approx(1e-3, rel=0.1)
    assert 1 / line.s_per_byte == pytest.approx(1e9, rel=0.25)


@pytest.mark.parametrize(
    "points",
    [
        [(1000, 1.0), (2000, 3.0), (4000, 9.0)],  # would begin below zero
        [(1000, 3.0), (2000, 2.0), (4000, 1.0)],  # would end there
        [(1000, 1.0)],
    ],
)
def test_no_part_of_a_line_is_negative(points):
    line = fit_line(points)
    assert line.latency_s == 0
    assert line.s_per_byte > 0


def test_medians_count_and_long_messages_end_it():
    asked = []

    def seconds_of(size):
        asked.append(size)
        disturbed = 100 if asked.count(size) == 2 else 1
        return disturbed * (0.01 + size / 2e6)

    line = measure_line(seconds_of, repeats=3)
    assert line.latency_s == pytest.approx(0.01)
    assert line.s_per_byte == pytest.approx(1 / 2e6)
    assert max(asked) == SIZES[3]
    assert asked.count(SIZES[0]) == 4
