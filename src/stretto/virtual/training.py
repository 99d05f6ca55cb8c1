"""The training loop of virtual workers: many workers' training in one process.

A step does the following::

    samples       each worker's share of the global batch, the same as a rank's
    gradients     forward and backward of every worker on its own module     (`worker_gradients`)
    update        one optimizer step for all replicas at once                (`stepping`)
    averaging     replicas are averaged as ranks would by messages           (`averaging`)
    evaluation    when due: the mean model, and each worker on its share of the test data

With AD-PSGD, ranks do not wait for each other. There, updates and pairwise averages run one by one
in a random order (`stepping.ArrivalOrderWorkers`). On a CPU only one worker's activations live at a
time.
"""

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stretto.data.loader import LoadedSamples, Prefetcher
from stretto.errors import ConfigError
from stretto.optim import LARSConfig
from stretto.run import PreparedRun, RunConfig
from stretto.strategies import ADPSGDConfig
from stretto.telemetry.events import EvalDone
from stretto.train.evaluate import StatisticsSampling, compute_batch_statistics, sum_metrics
from stretto.train.precision import forward_in_precision
from stretto.virtual.averaging import check_lost_share, count_replicas
from stretto.virtual.stacked_models import copy_means_
from stretto.virtual.stepping import ArrivalOrderWorkers, LockStepWorkers
from stretto.virtual.worker_gradients import WorkerGradients

ProgressCallback = Callable[[int, int, float], None]
"""Called after each step with steps done, steps in all and the loss of the step."""
NUM_DISTANCE_SAMPLES = 50
"""About how often a run measures the consensus distance."""


@dataclass(frozen=True, slots=True)
class VirtualTrainingResult:
    """The result of a run of virtual workers."""

    evaluations: tuple[EvalDone, ...]
    losses: tuple[float, ...]
    """The mean loss of each step, over all workers."""
    consensus_distances: tuple[tuple[int, float], ...]
    """(steps done, consensus distance) pairs; empty where all workers share one replica."""
    seconds: float
    """Wall-clock time, evaluations included."""
    samples_per_s: float
    stop_reason: str = ""
    """Why the run ended early; empty if it did not."""


def train_virtually(
    config: RunConfig,
    prepared: PreparedRun,
    workers: int,
    report_progress: ProgressCallback = lambda *_: None,
    *,
    lost: float = 0.0,
    device: str = "cpu",
) -> VirtualTrainingResult:
    """Train as ``workers`` ranks would, and return losses and evaluations.

    A loss that is not finite ends the run without an error, see `stop_reason`.

    Args:
        config: Settings of the run.
        prepared: Its data and initial model.
        workers: Number of virtual workers.
        report_progress: Called after each step.
        lost: Share of gossip messages that never arrive, 0 to below 1.
        device: "cpu" or "cuda". On "cuda" a CUDA graph holds the step of all workers.

    Raises:
        ConfigError: Virtual workers do not support these settings, this number of workers, or
            this device.
    """
    run = _VirtualRun(config, prepared, workers, lost, find_device(device))
    began_s = time.monotonic()
    losses: list[float] = []
    evaluations: list[EvalDone] = []
    consensus_distances: list[tuple[int, float]] = []
    stop_reason = ""
    with Prefetcher(prepared.source, run.worker_gradients.samples_by_step()) as batches:
        for step, loss in enumerate(run.step_order.steps(batches)):
            losses.append(loss)
            if not math.isfinite(loss):
                stop_reason = f"the loss of step {step + 1} is not finite"
                break
            report_progress(step + 1, run.worker_gradients.total_steps, loss)
            if run.is_distance_due(step):
                consensus_distances.append((step + 1, run.consensus_distance()))
            if run.is_evaluation_due(step):
                evaluations.append(run.evaluate(step + 1))
    seconds = time.monotonic() - began_s
    rate = len(losses) * config.train.batch / seconds
    return VirtualTrainingResult(
        tuple(evaluations), tuple(losses), tuple(consensus_distances), seconds, rate, stop_reason
    )


class StepOrder(Protocol):
    """The order in which workers take their steps: `LockStepWorkers` or `ArrivalOrderWorkers`."""

    replicas_differ: bool
    """Whether the strategy keeps replicas that may differ; true even where there is only one."""

    def steps(self, batches: Iterable[LoadedSamples]) -> Iterator[float]:
        """Train on ``batches`` and yield the mean loss of each step.

        Whenever a synchronizing step is yielded, all workers have taken it.
        """
        ...

    def means(self) -> dict[str, Tensor]:
        """Return the mean of all replicas, in-flight rounds included, by parameter name."""
        ...


class _VirtualRun:
    """The workers of one run, with the measurements of their replicas."""

    def __init__(
        self,
        config: RunConfig,
        prepared: PreparedRun,
        workers: int,
        lost: float,
        device: torch.device,
    ) -> None:
        num_replicas = check_virtual(config, workers, lost)
        self.worker_gradients = WorkerGradients(config, prepared, workers, num_replicas, device)
        self._train, self._stack = config.train, self.worker_gradients.stack
        self._mean = copy.deepcopy(self.worker_gradients.model)
        strategy = config.strategy
        self.step_order: StepOrder = (
            ArrivalOrderWorkers(self.worker_gradients, strategy.seed, self.is_sync_step)
            if isinstance(strategy, ADPSGDConfig)
            else LockStepWorkers(self.worker_gradients, lost)
        )

    def is_distance_due(self, step: int) -> bool:
        """Return whether the consensus distance is measured after ``step``."""
        done, total = step + 1, self.worker_gradients.total_steps
        return self.step_order.replicas_differ and (
            done % -(-total // NUM_DISTANCE_SAMPLES) == 0 or done == total
        )

    def consensus_distance(self) -> float:
        """Return the RMS distance of the replicas from their mean, relative to its norm."""
        return self._stack.consensus_distance(self.step_order.means())

    def is_evaluation_due(self, step: int) -> bool:
        """Return whether the models are evaluated after ``step``."""
        done = step + 1
        every = self._train.eval_every or self.worker_gradients.epoch_steps
        return done % every == 0 or done == self.worker_gradients.total_steps

    def is_sync_step(self, step: int) -> bool:
        """Return whether ranks wait for each other after ``step``: to evaluate or end an epoch."""
        return self.is_evaluation_due(step) or (step + 1) % self.worker_gradients.epoch_steps == 0

    @torch.no_grad()
    def evaluate(self, done: int) -> EvalDone:
        """Evaluate the mean model after ``done`` steps.

        Where replicas differ, each worker also evaluates its own on its share of the test data.
        """
        worker_gradients, precision = self.worker_gradients, self._train.precision
        test = worker_gradients.prepared.test_source
        all_indices = np.arange(test.num_samples)
        local_sums = torch.zeros(3, dtype=torch.float64)
        replicas_differ = self.step_order.replicas_differ
        if replicas_differ:
            for worker, module in enumerate(self._stack.modules):
                local_sums += sum_metrics(
                    module, test, all_indices[worker :: worker_gradients.workers], precision
                )
        means = self.step_order.means()
        copy_means_(self._mean, means, self._stack)
        if self._train.statistics == "reestimate":
            self._reestimate(done)
        sums = sum_metrics(self._mean, test, all_indices, precision)
        loss, accuracy = (sums[:2] / sums[2:].clamp(min=1)).tolist()
        local_loss, local_accuracy = (local_sums[:2] / local_sums[2:].clamp(min=1)).tolist()
        return EvalDone(
            step=done,
            epoch=(done - 1) // worker_gradients.epoch_steps,
            loss=loss,
            accuracy=accuracy,
            local_loss=local_loss if replicas_differ else None,
            local_accuracy=local_accuracy if replicas_differ else None,
            consensus_distance=self._stack.consensus_distance(means) if replicas_differ else None,
        )

    def _reestimate(self, done: int) -> None:
        worker_gradients = self.worker_gradients
        seed, workers = worker_gradients.config.run.seed, worker_gradients.workers
        compute_batch_statistics(
            self._mean,
            StatisticsSampling(self._train, worker_gradients.prepared.source, seed, done, workers),
            range(workers),
            lambda inputs: forward_in_precision(
                self._train.precision, self._mean, inputs.to(worker_gradients.device)
            ),
        )


def find_device(name: str) -> torch.device:
    """Return the device ``name``, "cpu" or "cuda", for all workers.

    Raises:
        ConfigError: The name is neither, or PyTorch finds no GPU.
    """
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: expected cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch finds no GPU here; leave the option out")
    return torch.device(name)


def check_virtual(config: RunConfig, workers: int, lost: float = 0.0) -> int:
    """Return the number of replicas that ``workers`` virtual workers keep in this run.

    Raises:
        ConfigError: Virtual workers do not support these settings, or not this number of workers.
    """
    train = config.train
    if workers < 1:
        raise ConfigError(f"{workers} virtual workers: expected at least 1")
    if train.batch < workers:
        raise ConfigError(
            f"train.batch = {train.batch}: {workers} workers cannot have a sample each; take at "
            f"most {train.batch} workers, or a larger batch"
        )
    if train.precision == "fp16":
        raise ConfigError(
            'train.precision = "fp16": virtual workers have no loss scaling; take "bf16"'
        )
    check_lost_share(config.strategy, lost)
    num_replicas = count_replicas(config.strategy, workers)
    if num_replicas > 1 and isinstance(config.optim, LARSConfig) and config.optim.norm_group > 1:
        raise ConfigError(
            f"optim.norm_group = {config.optim.norm_group}: each virtual worker computes its "
            "own norms; only ranks, in stretto train, can share them: leave norm_group out"
        )
    return num_replicas
