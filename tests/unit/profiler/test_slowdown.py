"""Slowdown by messages and the cost of messages, with sleeps in place of both."""

import time

import pytest

from stretto.comm.in_process_transports import run_threads
from stretto.profiler.links import MESSAGE_SIZES, fit_message_cost, measure_message_cost
from stretto.profiler.slowdown import BackgroundTraffic, measure_slowdown


class Wire:
    """Simulated messages of 10 ms each, one after another."""

    def __init__(self):
        self.over_s = 0.0
        self.started = 0

    def start(self):
        self.over_s = max(self.over_s, time.perf_counter()) + 0.01
        self.started += 1

    def wait(self):
        time.sleep(max(0.0, self.over_s - time.perf_counter()))

    @property
    def busy(self):
        return time.perf_counter() < self.over_s


@pytest.mark.timed
@pytest.mark.parametrize(("factors", "slowdown"), [((1, 1), 1), ((2, 1), 2), ((1, 3), 3)])
def test_the_largest_slowdown_of_all_ranks_counts(factors, slowdown):
    def work(transport):
        wire = Wire()

        def step():
            time.sleep(0.02 * (factors[transport.rank] if wire.busy else 1))

        found = measure_slowdown(
            step, BackgroundTraffic(wire.start, wire.wait), transport, repeats=3
        )
        assert not wire.busy
        return found, wire.started

    results = run_threads(2, work)
    assert len({started for _, started in results}) == 1, (
        "all ranks must start the same number of messages"
    )
    for found, _ in results:
        assert found == pytest.approx(slowdown, rel=0.15)


def test_messages_outlast_a_slow_step():
    wire, seen = Wire(), []

    def step():
        was_busy = wire.busy
        time.sleep(0.01 * (3 if was_busy else 1))
        seen.append((was_busy, wire.busy))

    run_threads(
        1,
        lambda transport: measure_slowdown(
            step, BackgroundTraffic(wire.start, wire.wait), transport
        ),
    )
    assert {still for was, still in seen if was} == {True}


def test_a_slowdown_is_at_least_one():
    wire = Wire()

    def step():
        time.sleep(0.001 if wire.busy else 0.004)

    factors = run_threads(
        1,
        lambda transport: measure_slowdown(
            step, BackgroundTraffic(wire.start, wire.wait), transport
        ),
    )
    assert factors == [1.0]


def test_an_exact_line_is_fitted():
    line = fit_message_cost([(size, 2e-3 + size / 50e6) for size in MESSAGE_SIZES])
    assert line.latency_s == pytest.approx(2e-3)
    assert 1 / line.s_per_byte == pytest.approx(50e6)


def test_errors_of_the_fit_are_relative():
    points = [(size, 1e-3 + size / 1e9) for size in MESSAGE_SIZES]
    with_outlier = [*points[:-1], (MESSAGE_SIZES[-1], 1.2 * points[-1][1])]
    line = fit_message_cost(with_outlier)
    assert line.latency_s == pytest.approx(1e-3, rel=0.1)
    assert 1 / line.s_per_byte == pytest.approx(1e9, rel=0.25)


@pytest.mark.parametrize(
    "points",
    [
        [(1000, 1.0), (2000, 3.0), (4000, 9.0)],  # a negative latency
        [(1000, 3.0), (2000, 2.0), (4000, 1.0)],  # a negative time per byte
        [(1000, 1.0)],
    ],
)
def test_latency_and_time_per_byte_are_not_negative(points):
    line = fit_message_cost(points)
    assert line.latency_s == 0
    assert line.s_per_byte > 0


def test_medians_count_and_a_long_message_ends_the_measurement():
    sizes = []

    def seconds_of(size):
        sizes.append(size)
        noise = 100 if sizes.count(size) == 2 else 1
        return noise * (0.01 + size / 2e6)

    line = measure_message_cost(seconds_of, repeats=3)
    assert line.latency_s == pytest.approx(0.01)
    assert line.s_per_byte == pytest.approx(1 / 2e6)
    assert max(sizes) == MESSAGE_SIZES[3]
    assert sizes.count(MESSAGE_SIZES[0]) == 4
