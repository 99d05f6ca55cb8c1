"""The order in which virtual workers step: in lock step, or asynchronously as in AD-PSGD.

`LockStepWorkers` takes every step with all workers at once. `ArrivalOrderWorkers` is the
counterpart of `stretto.strategies.adpsgd`. Real ranks average in the order in which messages
arrive; virtual workers use `random_operation_order`, a function of the strategy's seed. They
synchronize after the same steps as real ranks, and their lead over the slowest worker has the same
bound.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from stretto.data.loader import LoadedSamples
from stretto.optim import build_stacked_optimizer
from stretto.optim.rules import average_pair_
from stretto.topology import OperationKind, random_operation_order
from stretto.train.step_consensus import LAG
from stretto.virtual.averaging import build_averaging
from stretto.virtual.worker_gradients import RECORDERS, CapturedStep, WorkerBatch, WorkerGradients


class LockStepWorkers:
    """One optimizer updates all replicas at once, then the strategy averages them."""

    def __init__(self, worker_gradients: WorkerGradients, lost: float = 0.0) -> None:
        """Prepare the workers; the share ``lost`` of gossip messages never arrives."""
        self._worker_gradients, self._stack = worker_gradients, worker_gradients.stack
        config, model = worker_gradients.config, worker_gradients.model
        self._optimizer = build_stacked_optimizer(
            config.optim, model, self._stack.values, peak_lr=worker_gradients.derived.lr
        )
        self._averaging = build_averaging(
            config.strategy, model, self._stack, self._optimizer, lost
        )
        self.replicas_differ = self._averaging.replicas_differ
        self._captured_step: CapturedStep | None = None

    def steps(self, batches: Iterable[LoadedSamples]) -> Iterator[float]:
        """Train on ``batches``; yield the mean loss of each step once all workers have taken it."""
        for step, batch in enumerate(batches):
            worker_batches = self._worker_gradients.split_batch(step, batch)
            loss = self._accumulate_gradients(step, worker_batches) / len(batch.inputs)
            if math.isfinite(loss):
                self._update(step)
            yield loss

    def means(self) -> dict[str, Tensor]:
        """Return the mean of all replicas, in-flight rounds included, by parameter name."""
        return self._averaging.means()

    def _accumulate_gradients(self, step: int, worker_batches: Sequence[WorkerBatch]) -> float:
        """Compute the gradients of all replicas; return the sum of the losses of all samples."""
        worker_gradients = self._worker_gradients
        if (recorder := RECORDERS.get(worker_gradients.device.type)) is not None:
            self._captured_step = self._captured_step or CapturedStep(
                worker_gradients, worker_batches, recorder
            )
            if self._captured_step.fits(worker_batches):
                return self._captured_step.accumulate_gradients(worker_batches)
        self._stack.rows.clear_gradients()
        num_samples = sum(len(inputs) for inputs, _ in worker_batches)
        return sum(
            worker_gradients.accumulate_gradients(step, worker, worker_batch, num_samples)
            for worker, worker_batch in enumerate(worker_batches)
        )

    @torch.no_grad()
    def _update(self, step: int) -> None:
        lr = self._worker_gradients.derived.rate_at(step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._averaging.after_backward(step)
        if (limit := self._worker_gradients.config.train.clip_norm) is not None:
            self._stack.rows.clip_gradients_(limit)
        self._averaging.before_update()
        self._optimizer.step()
        self._averaging.after_update(step, lr)


class ArrivalOrderWorkers:
    """Asynchronous workers: each has its own optimizer and updates its own replica in turn."""

    replicas_differ = True

    def __init__(
        self, worker_gradients: WorkerGradients, seed: int, is_sync_step: Callable[[int], bool]
    ) -> None:
        """Prepare the workers; ``is_sync_step(step)`` says whether all wait after that step."""
        self._worker_gradients, self._seed, self._is_sync_step = (
            worker_gradients,
            seed,
            is_sync_step,
        )
        config, model = worker_gradients.config, worker_gradients.model
        self._rows = [
            worker_gradients.stack.rows.select(worker) for worker in range(worker_gradients.workers)
        ]
        self._optimizers = [
            build_stacked_optimizer(
                config.optim, model, rows.values, peak_lr=worker_gradients.derived.lr
            )
            for rows in self._rows
        ]

    def steps(self, batches: Iterable[LoadedSamples]) -> Iterator[float]:
        """Train on ``batches``; yield the mean loss of each step once all workers have begun it.

        The loss of a step with synchronization is yielded after all its updates and averages.
        """
        window = _StepWindow(self._worker_gradients, batches)
        first = 0
        for step in range(self._worker_gradients.total_steps):
            if self._is_sync_step(step):
                yield from self._run_until_sync(first, step + 1, window)
                first = step + 1

    def means(self) -> dict[str, Tensor]:
        """Return the mean of all replicas, by parameter name."""
        return self._worker_gradients.stack.means()

    def _run_until_sync(self, first: int, end: int, window: "_StepWindow") -> Iterator[float]:
        workers = self._worker_gradients.workers
        for operation in random_operation_order(
            workers, end - first, self._seed, first=first, max_lead=LAG
        ):
            if operation.kind is OperationKind.READ:
                self._read(operation.step, operation.worker, window)
                if operation.step + 1 < end and window.is_begun_by_all(operation.step):
                    yield window.pop_loss(operation.step)
            elif operation.kind is OperationKind.APPLY:
                self._apply(operation.step, operation.worker)
            else:
                self._average(operation.worker, operation.peer)
        yield window.pop_loss(end - 1)

    def _read(self, step: int, worker: int, window: "_StepWindow") -> None:
        """Compute the gradient of a worker at its current parameters; `_apply` uses it later."""
        worker_batch, num_samples = window.take(step, worker)
        self._rows[worker].clear_gradients()
        window.add(
            step,
            self._worker_gradients.accumulate_gradients(step, worker, worker_batch, num_samples),
        )

    @torch.no_grad()
    def _apply(self, step: int, worker: int) -> None:
        optimizer = self._optimizers[worker]
        for group in optimizer.param_groups:
            group["lr"] = self._worker_gradients.derived.rate_at(step)
        if (limit := self._worker_gradients.config.train.clip_norm) is not None:
            self._rows[worker].clip_gradients_(limit)
        optimizer.step()

    @torch.no_grad()
    def _average(self, worker: int, peer: int) -> None:
        for value in self._worker_gradients.stack.values.values():
            average_pair_(value.data[worker], value.data[peer])


class _StepWindow:
    """Samples and summed losses of the steps that not all workers have begun."""

    def __init__(self, worker_gradients: WorkerGradients, batches: Iterable[LoadedSamples]) -> None:
        self._worker_gradients, self._batches = worker_gradients, enumerate(batches)
        self._worker_batches: dict[int, list[WorkerBatch | None]] = {}
        self._sizes: dict[int, int] = {}
        self._losses: dict[int, float] = {}

    def take(self, step: int, worker: int) -> tuple[WorkerBatch, int]:
        """Return a worker's batch of a step, once, and the sample count of all workers in it."""
        while step not in self._worker_batches:
            number, batch = next(self._batches)
            self._worker_batches[number] = list(self._worker_gradients.split_batch(number, batch))
            self._sizes[number] = len(batch.inputs)
            self._losses[number] = 0.0
        worker_batch, self._worker_batches[step][worker] = self._worker_batches[step][worker], None
        assert worker_batch is not None, "a worker begins a step once"
        return worker_batch, self._sizes[step]

    def add(self, step: int, losses: float) -> None:
        """Add the summed losses of one worker in a step."""
        self._losses[step] += losses

    def is_begun_by_all(self, step: int) -> bool:
        """Return whether every worker has begun a step."""
        return all(worker_batch is None for worker_batch in self._worker_batches[step])

    def pop_loss(self, step: int) -> float:
        """Remove a step that all workers have begun; return its mean loss."""
        del self._worker_batches[step]
        return self._losses.pop(step) / self._sizes.pop(step)
