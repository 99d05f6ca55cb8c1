"""Where a step's time goes: compute, exposed communication, waiting for data."""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.comm.channel import Pending
from stretto.data.loader import LoadedShare
from stretto.strategy import Agreed
from stretto.telemetry.events import EvalDone, RunEnded, Scaling, StepDone
from stretto.telemetry.timeline import Span
from stretto.train.parts import Parts


@dataclass(frozen=True, slots=True)
class _Line:
    """A line whose sums are under way."""

    step: int
    steps: int
    """How many it is about."""
    lr: float
    time_left_s: float
    apart: float | None
    """How far ranks are from their mean, as last measured; the same on all."""
    sums: Tensor
    """Over ranks: losses, samples, seconds of steps, of communication, of waiting for data."""
    pending: Pending


class Meter:
    """Adds up times and losses locally; ranks tell each other only when a line is due."""

    def __init__(self, parts: Parts, first_step: int) -> None:
        self._parts = parts
        self._first_step = first_step
        self._began_s = self._paced_s = time.monotonic()
        self._trained_s = 0.0
        self._trained_samples = 0
        self._computed_s = 0.0
        self._done = first_step
        self._last_loss = float("nan")
        self._lines: deque[_Line] = deque()
        self._loss: Tensor | None = None
        self._apart: float | None = None
        self._clear()

    @contextmanager
    def step(self, batch: LoadedShare) -> Iterator[None]:
        """Time one step; the wait for its batch came just before."""
        start_s = time.monotonic()
        wait = Span("wait for data", "wait", start_s - batch.wait_s, start_s, self._done)
        self._parts.recorder.add(wait)
        yield
        self._step_s += time.monotonic() - start_s + batch.wait_s
        self._data_s += batch.wait_s
        self._steps += 1
        self._done += 1

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Time what communication did not hide behind compute."""
        start_s = time.monotonic()
        yield
        self._comm_s += time.monotonic() - start_s

    def add(self, loss: Tensor, num_samples: int, wait_s: float, agreed: Agreed | None) -> None:
        """Add this rank's sum of losses over its samples; the device is not read yet.

        Updates made while gradients were waited for are compute, what forward and backward waited
        for is not. Of a step that was left out only the time counts.
        """
        self._comm_s += wait_s
        if agreed is not None:
            self._comm_s += agreed.waited_s - agreed.updated_s
            self._loss = loss if self._loss is None else self._loss + loss
            self._samples += num_samples
            self._apart = self._apart if agreed.apart is None else agreed.apart

    def begin_line(self, lr: float) -> None:
        """Begin to add up the means since the last line, over all ranks."""
        parts = self._parts
        loss = float(self._loss or 0.0)
        times = [self._step_s, self._comm_s, self._data_s]
        sums = torch.tensor([loss, self._samples, *times], dtype=torch.float64)
        ran, left = self._done - self._first_step, parts.total_steps - self._done
        time_left_s = (time.monotonic() - self._paced_s) / ran * left
        pending = parts.channel.start_all_reduce(sums)
        line = _Line(self._done, self._steps, lr, time_left_s, self._apart, sums, pending)
        self._lines.append(line)
        self._clear()

    def lines(self, lag: int) -> Iterator[StepDone]:
        """Yield the lines that began at least ``lag`` steps ago, as all ranks have them."""
        while self._lines and self._lines[0].step <= self._done - lag:
            yield self._added_up(self._lines.popleft())

    def _added_up(self, line: _Line) -> StepDone:
        line.pending.wait()
        loss_sum, samples, *times = line.sums.tolist()
        step_s, comm_s, data_s = (total / self._parts.channel.size for total in times)
        self._trained_s += step_s
        self._trained_samples += int(samples)
        self._computed_s += max(0.0, step_s - comm_s - data_s)
        self._last_loss = loss_sum / samples if samples else math.nan
        return StepDone(
            step=line.step,
            epoch=(line.step - 1) // self._parts.epoch_steps,
            loss=self._last_loss,
            lr=line.lr,
            samples_per_s=samples / step_s,
            step_s=step_s / line.steps,
            compute_share=max(0.0, 1 - (comm_s + data_s) / step_s),
            comm_share=comm_s / step_s,
            data_share=data_s / step_s,
            time_left_s=line.time_left_s,
            apart=line.apart,
        )

    def ended(self, result: EvalDone | None, stopped: str, again: bool) -> RunEnded:
        """Return the closing word; throughput is that of the training steps alone."""
        return RunEnded(
            step=self._done,
            seconds=time.monotonic() - self._began_s,
            loss=result.loss if result else self._last_loss,
            accuracy=result.accuracy if result else None,
            samples_per_s=self._trained_samples / self._trained_s if self._trained_s else 0.0,
            scaling=self._scaling(),
            stopped=stopped,
            again=again,
        )

    def go_back(self, step: int) -> None:
        """Count on from an earlier step; what was not told of the steps since is dropped."""
        for line in self._lines:
            line.pending.wait()
        self._lines.clear()
        self._done = self._first_step = step
        self._paced_s = time.monotonic()
        self._clear()

    def _scaling(self) -> Scaling | None:
        """Return S and e; ranks compute side by side, each its share of the samples."""
        workers = self._parts.channel.size
        if not self._trained_samples or not self._computed_s:
            return None
        one_worker = self._trained_samples / workers / self._computed_s
        return Scaling(one_worker, workers, self._computed_s / self._trained_s)

    def _clear(self) -> None:
        self._loss = self._apart = None
        self._step_s = self._comm_s = self._data_s = 0.0
        self._steps = self._samples = 0
