"""Measurement of step times: compute, exposed communication, waiting for data."""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.comm.transport import Work
from stretto.data.loader import LoadedSamples
from stretto.strategies import StepGradients
from stretto.telemetry.events import EvalDone, RunEnded, StepDone, ThroughputFactors
from stretto.telemetry.timeline import Span
from stretto.train.run_parts import RunParts


@dataclass(frozen=True, slots=True)
class _PendingMetrics:
    """A log line whose all-reduce is running."""

    step: int
    steps: int
    """Number of steps it covers."""
    lr: float
    time_left_s: float
    consensus_distance: float | None
    """Distance of the replicas from their mean, as last measured; the same on all ranks."""
    sums: Tensor
    """Sums over ranks of losses, samples, and seconds of steps, communication and data waits."""
    work: Work


class StepMeter:
    """Accumulates times and losses locally; ranks communicate only when a log line is due."""

    def __init__(self, parts: RunParts, first_step: int) -> None:
        self._parts = parts
        self._first_step = first_step
        self._run_start_s = self._pace_start_s = time.monotonic()
        self._trained_s = 0.0
        self._trained_samples = 0
        self._computed_s = 0.0
        self._steps_done = first_step
        self._last_loss = float("nan")
        self._pending_metrics: deque[_PendingMetrics] = deque()
        self._loss: Tensor | None = None
        self._consensus_distance: float | None = None
        self._reset()

    @contextmanager
    def step(self, batch: LoadedSamples) -> Iterator[None]:
        """Time one step, including the wait for its batch, which happened just before."""
        start_s = time.monotonic()
        wait = Span("wait for data", "wait", start_s - batch.wait_s, start_s, self._steps_done)
        self._parts.recorder.add(wait)
        yield
        self._step_s += time.monotonic() - start_s + batch.wait_s
        self._data_s += batch.wait_s
        self._steps += 1
        self._steps_done += 1

    @contextmanager
    def time_communication(self) -> Iterator[None]:
        """Time the communication that compute did not hide."""
        start_s = time.monotonic()
        yield
        self._comm_s += time.monotonic() - start_s

    def add(
        self, loss: Tensor, num_samples: int, wait_s: float, sync_result: StepGradients | None
    ) -> None:
        """Add the sum of this rank's losses; the device is not synchronised here.

        Updates made while waiting for gradients count as compute. ``wait_s``, the wait in forward
        and backward, counts as communication. Of a skipped step only the time counts.
        """
        self._comm_s += wait_s
        if sync_result is not None:
            self._comm_s += sync_result.waited_s - sync_result.updated_s
            self._loss = loss if self._loss is None else self._loss + loss
            self._samples += num_samples
            self._consensus_distance = (
                self._consensus_distance
                if sync_result.consensus_distance is None
                else sync_result.consensus_distance
            )

    def begin_metrics(self, lr: float) -> None:
        """Start the all-reduce of the sums since the last log line."""
        parts = self._parts
        loss = float(self._loss or 0.0)
        times = [self._step_s, self._comm_s, self._data_s]
        sums = torch.tensor([loss, self._samples, *times], dtype=torch.float64)
        ran, left = self._steps_done - self._first_step, parts.total_steps - self._steps_done
        time_left_s = (time.monotonic() - self._pace_start_s) / ran * left
        work = parts.transport.start_all_reduce(sums)
        metrics = _PendingMetrics(
            self._steps_done, self._steps, lr, time_left_s, self._consensus_distance, sums, work
        )
        self._pending_metrics.append(metrics)
        self._reset()

    def finished_metrics(self, lag: int) -> Iterator[StepDone]:
        """Yield the log lines that began at least ``lag`` steps ago; the same on all ranks."""
        while self._pending_metrics and self._pending_metrics[0].step <= self._steps_done - lag:
            yield self._wait_for_metrics(self._pending_metrics.popleft())

    def _wait_for_metrics(self, metrics: _PendingMetrics) -> StepDone:
        metrics.work.wait()
        loss_sum, samples, *times = metrics.sums.tolist()
        step_s, comm_s, data_s = (total / self._parts.transport.size for total in times)
        self._trained_s += step_s
        self._trained_samples += int(samples)
        self._computed_s += max(0.0, step_s - comm_s - data_s)
        self._last_loss = loss_sum / samples if samples else math.nan
        return StepDone(
            step=metrics.step,
            epoch=(metrics.step - 1) // self._parts.epoch_steps,
            loss=self._last_loss,
            lr=metrics.lr,
            samples_per_s=samples / step_s,
            step_s=step_s / metrics.steps,
            compute_share=max(0.0, 1 - (comm_s + data_s) / step_s),
            comm_share=comm_s / step_s,
            data_share=data_s / step_s,
            time_left_s=metrics.time_left_s,
            consensus_distance=metrics.consensus_distance,
        )

    def run_ended(self, result: EvalDone | None, stopped: str, again: bool) -> RunEnded:
        """Return the final event; its throughput covers training steps only."""
        return RunEnded(
            step=self._steps_done,
            seconds=time.monotonic() - self._run_start_s,
            loss=result.loss if result else self._last_loss,
            accuracy=result.accuracy if result else None,
            samples_per_s=self._trained_samples / self._trained_s if self._trained_s else 0.0,
            scaling=self._throughput_factors(),
            stopped=stopped,
            again=again,
        )

    def roll_back(self, step: int) -> None:
        """Continue from an earlier step; unreported metrics of later steps are dropped."""
        for metrics in self._pending_metrics:
            metrics.work.wait()
        self._pending_metrics.clear()
        self._steps_done = self._first_step = step
        self._pace_start_s = time.monotonic()
        self._reset()

    def _throughput_factors(self) -> ThroughputFactors | None:
        """Return S, N and the efficiency e, whose product is the throughput.

        The efficiency is the share of the time in which ranks compute.
        """
        workers = self._parts.transport.size
        if not self._trained_samples or not self._computed_s:
            return None
        one_worker = self._trained_samples / workers / self._computed_s
        return ThroughputFactors(one_worker, workers, self._computed_s / self._trained_s)

    def _reset(self) -> None:
        self._loss = self._consensus_distance = None
        self._step_s = self._comm_s = self._data_s = 0.0
        self._steps = self._samples = 0
