"""The meter on a clock that tests turn: shares, throughput, scaling and time left, by hand."""

from types import SimpleNamespace

import pytest
import torch

from stretto.strategies import StepGradients
from stretto.telemetry.timeline import Recorder
from stretto.train.meter import StepMeter


class TwoAlike:
    """A transport of two ranks whose other rank measures the same: a sum is twice one's own."""

    rank, size = 0, 2

    def start_all_reduce(self, sums):
        sums.mul_(2)
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock of the meter by one that stands still until a test moves it."""
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr("stretto.train.meter.time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def meter_of(clock, first_step=0, total_steps=100):
    parts = SimpleNamespace(
        transport=TwoAlike(), recorder=Recorder(0), total_steps=total_steps, epoch_steps=10
    )
    return StepMeter(parts, first_step)


def one_step(meter, clock, *, data_s=0.0, compute_s=0.0, comm_s=0.0, loss=0.0, more=None):
    """Let one step pass: a wait for data that is over, computation, communication."""
    with meter.step(SimpleNamespace(wait_s=data_s)):
        clock.s += compute_s
        with meter.time_communication():
            clock.s += comm_s
    gradients = StepGradients() if more is None else more
    meter.add(torch.tensor(loss, dtype=torch.float64), 10, 0.0, gradients)


def report(meter):
    meter.begin_metrics(0.1)
    (line,) = meter.finished_metrics(lag=0)
    return line


def test_compute_communication_and_the_wait_for_data_have_their_shares(clock):
    meter = meter_of(clock)
    one_step(meter, clock, data_s=2.0, compute_s=3.0, comm_s=5.0)
    line = report(meter)
    assert line.step_s == pytest.approx(10.0)
    assert line.compute_share == pytest.approx(0.3)
    assert line.comm_share == pytest.approx(0.5)
    assert line.data_share == pytest.approx(0.2)


def test_updates_beside_communication_are_compute_and_waits_inside_backward_are_not(clock):
    meter = meter_of(clock)
    # Of 4 s until the gradients were there, 1 s went into updates; backward itself waited 2 s.
    gradients = StepGradients(updated_s=1.0, waited_s=2.0)
    one_step(meter, clock, compute_s=6.0, comm_s=4.0, more=gradients)
    line = report(meter)
    assert line.comm_share == pytest.approx((4.0 - 1.0 + 2.0) / 10.0)
    assert line.compute_share == pytest.approx(0.5)


def test_throughput_is_that_of_one_worker_times_workers_times_efficiency(clock):
    meter = meter_of(clock)
    for _ in range(3):
        one_step(meter, clock, data_s=1.0, compute_s=2.0, comm_s=5.0, loss=20.0)
    line = report(meter)
    assert line.samples_per_s == pytest.approx(20 / 8)  # 10 samples on each of 2 ranks, in 8 s
    assert line.loss == pytest.approx(2.0)
    ended = meter.run_ended(None, "", again=False)
    assert ended.samples_per_s == pytest.approx(20 / 8)
    assert ended.scaling.one_worker == pytest.approx(10 / 2)  # 10 samples in 2 s of computing
    assert ended.scaling.workers == 2
    assert ended.scaling.efficiency == pytest.approx(2 / 8)


def test_the_time_left_follows_from_the_steps_of_this_start_only(clock):
    meter = meter_of(clock, first_step=90, total_steps=100)
    one_step(meter, clock, compute_s=4.0)
    one_step(meter, clock, compute_s=6.0)
    line = report(meter)
    assert line.step == 92
    assert line.time_left_s == pytest.approx(8 * 5.0)  # 8 steps are left, 5 s each


def test_a_skipped_step_takes_time_and_adds_no_samples(clock):
    meter = meter_of(clock)
    one_step(meter, clock, compute_s=4.0, loss=10.0)
    with meter.step(SimpleNamespace(wait_s=0.0)):
        clock.s += 4.0
    meter.add(torch.tensor(99.0), 10, 0.0, None)
    line = report(meter)
    assert line.samples_per_s == pytest.approx(20 / 8)
    assert line.loss == pytest.approx(1.0)


def test_the_last_step_of_an_epoch_belongs_to_it(clock):
    meter = meter_of(clock, first_step=9)  # an epoch has 10 steps
    epochs = []
    for _ in range(2):
        one_step(meter, clock, compute_s=1.0)
        epochs.append(report(meter).epoch)
    assert epochs == [0, 1]


def test_a_line_is_given_out_lag_steps_after_it_began(clock):
    meter = meter_of(clock)
    one_step(meter, clock, compute_s=1.0)
    meter.begin_metrics(0.1)
    assert list(meter.finished_metrics(lag=1)) == []
    one_step(meter, clock, compute_s=1.0)
    (line,) = meter.finished_metrics(lag=1)
    assert line.step == 1


def test_after_a_roll_back_steps_and_pace_count_from_there(clock):
    meter = meter_of(clock)
    for _ in range(4):
        one_step(meter, clock, compute_s=1.0)
    meter.begin_metrics(0.1)  # a line that is never given out
    one_step(meter, clock, compute_s=9.0, loss=50.0)
    meter.roll_back(2)
    one_step(meter, clock, compute_s=3.0, loss=20.0)
    line = report(meter)
    assert (line.step, line.loss) == (3, pytest.approx(2.0))
    assert line.step_s == pytest.approx(3.0)
    assert line.time_left_s == pytest.approx(97 * 3.0)
