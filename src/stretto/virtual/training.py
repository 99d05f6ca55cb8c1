"""The training loop of virtual workers: what real ones would do, worker after worker.

::

    samples       each worker's share of the global batch, the one a rank would have
    gradients     forward and backward of every worker, on its own module      (`learners`)
    update        one step of the optimizer, for all models at once            (`in_step`)
    meeting       models meet, as ranks would by messages                      (`meetings`)
    evaluate      when due: the mean of all models, and each on its share of the test data

Where ranks would not wait for each other's steps, updates and averages of two come about one by
one, in an order that is drawn (`in_any_order`). Only one worker's activations live at a time.
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

from stretto.data.loader import LoadedShare, Prefetch
from stretto.errors import ConfigError
from stretto.optim import LARSConfig
from stretto.run import Prepared, RunConfig
from stretto.strategy import ADPSGDConfig
from stretto.telemetry.events import EvalDone
from stretto.train.evaluate import tested
from stretto.train.statistics import Look, learn_statistics
from stretto.train.step import forward_in
from stretto.virtual.in_any_order import InAnyOrder
from stretto.virtual.in_step import InStep
from stretto.virtual.learners import Learners
from stretto.virtual.meetings import check_lost, count_parties
from stretto.virtual.stack import put_means_

Told = Callable[[int, int, float], None]
"""Hears of progress: steps done, steps of all, the loss of the last one."""
LOOKS = 50
"""How often in a run, about, it is seen how far models are apart."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of virtual workers came to."""

    evaluations: tuple[EvalDone, ...]
    losses: tuple[float, ...]
    """The mean loss of each step."""
    apart: tuple[tuple[int, float], ...]
    """After which step, how far models were from their mean, where each worker has its own."""
    seconds: float
    samples_per_s: float
    diverged: str = ""
    """Why it ended before its end; empty where it did not."""


def train_virtually(
    config: RunConfig,
    prepared: Prepared,
    workers: int,
    tell: Told = lambda *_: None,
    *,
    lost: float = 0.0,
    device: str = "cpu",
) -> Outcome:
    """Train as ``workers`` ranks would, and return how that went.

    A loss that is not finite ends the run; that is an outcome, not an error. Of gossip's messages
    a share of ``lost`` never arrives. On "cuda" what all workers do in a step is recorded once.

    Raises:
        ConfigError: Workers cannot train like this, at this number of them, or not here.
    """
    run = _Run(config, prepared, workers, lost, find_device(device))
    began_s = time.monotonic()
    losses: list[float] = []
    evaluations: list[EvalDone] = []
    apart: list[tuple[int, float]] = []
    diverged = ""
    with Prefetch(prepared.source, run.learners.shares()) as batches:
        for step, loss in enumerate(run.pace.steps(batches)):
            losses.append(loss)
            if not math.isfinite(loss):
                diverged = f"the loss of step {step + 1} is not finite"
                break
            tell(step + 1, run.learners.total_steps, loss)
            if run.is_looked_at(step):
                apart.append((step + 1, run.apart()))
            if run.is_due(step):
                evaluations.append(run.evaluate(step + 1))
    seconds = time.monotonic() - began_s
    rate = len(losses) * config.train.batch / seconds
    return Outcome(tuple(evaluations), tuple(losses), tuple(apart), seconds, rate, diverged)


class Pace(Protocol):
    """How workers come to their steps."""

    own_models: bool
    """Whether parties have models of their own, be it only one."""

    def steps(self, batches: Iterable[LoadedShare]) -> Iterator[float]:
        """Take step after step, and yield the mean loss of each; where it is due, all have met."""
        ...

    def means(self) -> dict[str, Tensor]:
        """Return the mean of all parties, what is under way included, by name."""
        ...


class _Run:
    """A run's workers, and how they are looked at."""

    def __init__(
        self,
        config: RunConfig,
        prepared: Prepared,
        workers: int,
        lost: float,
        device: torch.device,
    ) -> None:
        parties = check_virtual(config, workers, lost)
        self.learners = Learners(config, prepared, workers, parties, device)
        self._train, self._stack = config.train, self.learners.stack
        self._mean = copy.deepcopy(self.learners.model)
        strategy = config.strategy
        self.pace: Pace = (
            InAnyOrder(self.learners, strategy.seed, self.all_meet)
            if isinstance(strategy, ADPSGDConfig)
            else InStep(self.learners, lost)
        )

    def is_looked_at(self, step: int) -> bool:
        """Say whether it is seen after ``step`` how far models are apart."""
        done, total = step + 1, self.learners.total_steps
        return self.pace.own_models and (done % -(-total // LOOKS) == 0 or done == total)

    def apart(self) -> float:
        """Return how far models are from their mean, as a share of its norm."""
        return self._stack.apart(self.pace.means())

    def is_due(self, step: int) -> bool:
        """Say whether models are evaluated after ``step``."""
        done = step + 1
        every = self._train.eval_every or self.learners.epoch_steps
        return done % every == 0 or done == self.learners.total_steps

    def all_meet(self, step: int) -> bool:
        """Say whether ranks wait for each other after ``step``: to evaluate, to end an epoch."""
        return self.is_due(step) or (step + 1) % self.learners.epoch_steps == 0

    @torch.no_grad()
    def evaluate(self, done: int) -> EvalDone:
        """Measure the mean of all models; each worker's own on its share, where they differ."""
        learners, precision = self.learners, self._train.precision
        test = learners.prepared.test_source
        everything = np.arange(test.num_samples)
        own = torch.zeros(3, dtype=torch.float64)
        has_own = self.pace.own_models
        if has_own:
            for worker, module in enumerate(self._stack.modules):
                own += tested(module, test, everything[worker :: learners.workers], precision)
        means = self.pace.means()
        put_means_(self._mean, means, self._stack)
        if self._train.statistics == "reestimate":
            self._reestimate(done)
        sums = tested(self._mean, test, everything, precision)
        loss, accuracy = (sums[:2] / sums[2:].clamp(min=1)).tolist()
        own_loss, own_accuracy = (own[:2] / own[2:].clamp(min=1)).tolist()
        return EvalDone(
            step=done,
            epoch=(done - 1) // learners.epoch_steps,
            loss=loss,
            accuracy=accuracy,
            own_loss=own_loss if has_own else None,
            own_accuracy=own_accuracy if has_own else None,
            apart=self._stack.apart(means) if has_own else None,
        )

    def _reestimate(self, done: int) -> None:
        learners = self.learners
        seed, workers = learners.config.run.seed, learners.workers
        learn_statistics(
            self._mean,
            Look(self._train, learners.prepared.source, seed, done, workers),
            range(workers),
            lambda inputs: forward_in(
                self._train.precision, self._mean, inputs.to(learners.device)
            ),
        )


def find_device(name: str) -> torch.device:
    """Return the device of that name, on which all workers are.

    Raises:
        ConfigError: It is not known, or not here.
    """
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: expected cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch finds no GPU here; leave it out")
    return torch.device(name)


def check_virtual(config: RunConfig, workers: int, lost: float = 0.0) -> int:
    """Return how many models ``workers`` would have between them.

    Raises:
        ConfigError: They cannot train like this, at this number of them.
    """
    train = config.train
    if workers < 1:
        raise ConfigError(f"{workers} virtual workers: there is at least 1")
    if train.batch < workers:
        raise ConfigError(
            f"train.batch = {train.batch}: {workers} workers cannot have a sample each; take at "
            f"most {train.batch} workers, or a larger batch"
        )
    if train.precision == "fp16":
        raise ConfigError(
            'train.precision = "fp16": virtual workers have no scale of the loss; take "bf16"'
        )
    check_lost(config.strategy, lost)
    parties = count_parties(config.strategy, workers)
    if parties > 1 and isinstance(config.optim, LARSConfig) and config.optim.norm_group > 1:
        raise ConfigError(
            f"optim.norm_group = {config.optim.norm_group}: each virtual worker takes norms of its "
            "own; only ranks, in stretto train, can share them: leave norm_group out"
        )
    return parties
