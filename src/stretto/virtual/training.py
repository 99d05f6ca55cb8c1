"""The training loop of virtual workers: what real ones would do, worker after worker.

::

    samples       each worker's share of the global batch, the one a rank would have
    gradients     forward and backward of every worker, on its own module
    update        one step of the optimizer, for all models at once
    meeting       models meet, as ranks would by messages
    evaluate      when due: the mean of all models, and each on its share of the test data

Only one worker's activations live at a time.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stretto.data.loader import LoadedShare, Prefetch
from stretto.data.order import Share, step_share, steps_per_epoch
from stretto.errors import ConfigError, StrettoError
from stretto.model import per_sample_loss
from stretto.optim import LARSConfig, stacked_optimizer
from stretto.run import Prepared, RunConfig, derived_for
from stretto.telemetry.events import EvalDone
from stretto.train.evaluate import tested
from stretto.train.parts import count_epoch_steps, count_steps
from stretto.train.statistics import Look, learn_statistics
from stretto.train.step import forward_in, seed_randomness
from stretto.virtual.meetings import build_meeting, count_parties
from stretto.virtual.stack import Stack, put_means_

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
    config: RunConfig, prepared: Prepared, workers: int, tell: Told = lambda *_: None
) -> Outcome:
    """Train as ``workers`` ranks would, and return how that went.

    A loss that is not finite ends the run; that is an outcome, not an error.

    Raises:
        ConfigError: Workers cannot train like this, at this number of them.
    """
    run = _Run(config, prepared, workers)
    began_s = time.monotonic()
    losses: list[float] = []
    evaluations: list[EvalDone] = []
    apart: list[tuple[int, float]] = []
    diverged = ""
    with Prefetch(prepared.source, run.shares()) as batches:
        for step, batch in enumerate(batches):
            losses.append(run.step(step, batch))
            if not math.isfinite(losses[-1]):
                diverged = f"the loss of step {step + 1} is not finite"
                break
            tell(step + 1, run.total_steps, losses[-1])
            if run.is_looked_at(step):
                apart.append((step + 1, run.apart()))
            if run.is_due(step):
                evaluations.append(run.evaluate(step + 1))
    seconds = time.monotonic() - began_s
    rate = len(losses) * config.train.batch / seconds
    return Outcome(tuple(evaluations), tuple(losses), tuple(apart), seconds, rate, diverged)


class _Run:
    """A run's stacked models, and what is done to them in a step."""

    def __init__(self, config: RunConfig, prepared: Prepared, workers: int) -> None:
        self._config, self._train, self._prepared = config, config.train, prepared
        self._workers = workers
        source = prepared.source
        self.total_steps = count_steps(self._train, source.num_samples)
        self._epoch_steps = count_epoch_steps(self._train, source.num_samples)
        self._pass_steps = steps_per_epoch(source.num_samples, self._train.batch)
        self._derived = derived_for(config, source.num_samples)
        model = prepared.model
        self._stack = Stack(model, workers, check_virtual(config, workers))
        self._mean = copy.deepcopy(model)
        self._optimizer = stacked_optimizer(
            config.optim, model, self._stack.values, peak_lr=self._derived.lr
        )
        finish = build_meeting(config.strategy, model, self._stack)
        self._meeting = finish(self._optimizer)

    def shares(self) -> Iterator[Share]:
        """Yield the samples of each step, worker after worker."""
        for step in range(self.total_steps):
            of_workers = [self._share(step, worker) for worker in range(self._workers)]
            samples = np.concatenate([share.samples for share in of_workers])
            yield Share(samples, of_workers[0].epoch)

    def step(self, step: int, batch: LoadedShare) -> float:
        """Take one step of all workers; return the mean loss of its samples."""
        lr = self._derived.rate_at(step)
        self._stack.clear_gradients()
        losses = self._backward(step, batch)
        if math.isfinite(losses):
            self._update(step, lr)
        return losses

    def _backward(self, step: int, batch: LoadedShare) -> float:
        """Give every model its gradients."""
        num_samples = len(batch.inputs)
        factor = self._stack.parties / num_samples
        total = 0.0
        for worker, (inputs, targets) in enumerate(self._dealt(step, batch)):
            sizes = self._train.piece_sizes(len(inputs), self._workers)
            pieces = zip(inputs.split(sizes), targets.split(sizes), strict=True)
            for micro, (some, wanted) in enumerate(pieces):
                if len(some):
                    loss = self._loss(step, micro, worker, some, wanted)
                    total += float(loss.detach())
                    (loss * factor).backward()
        return total / num_samples

    def _loss(self, step: int, micro: int, worker: int, inputs: Tensor, targets: Tensor) -> Tensor:
        seed_randomness(self._config.run.seed, step, micro, worker)
        outputs = forward_in(self._train.precision, self._stack.modules[worker], inputs)
        return per_sample_loss(outputs, targets, self._train.label_smoothing).sum()

    @torch.no_grad()
    def _update(self, step: int, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self._train.clip_norm is not None:
            norms = self._stack.gradient_norms()
            self._stack.weigh_gradients_((self._train.clip_norm / (norms + 1e-6)).clamp(max=1.0))
        self._meeting.before_update()
        self._optimizer.step()
        self._meeting.after_update(step, lr)

    def is_looked_at(self, step: int) -> bool:
        """Say whether it is seen after ``step`` how far models are apart."""
        every = -(-self.total_steps // LOOKS)
        done = step + 1
        return self._meeting.own_models and (done % every == 0 or done == self.total_steps)

    def apart(self) -> float:
        """Return how far models are from their mean, as a share of its norm."""
        return self._stack.apart(self._meeting.means())

    def is_due(self, step: int) -> bool:
        """Say whether models are evaluated after ``step``."""
        done = step + 1
        every = self._train.eval_every or self._epoch_steps
        return done % every == 0 or done == self.total_steps

    @torch.no_grad()
    def evaluate(self, done: int) -> EvalDone:
        """Measure the mean of all models; each worker's own on its share, where they differ."""
        test, precision = self._prepared.test_source, self._train.precision
        everything = np.arange(test.num_samples)
        own = torch.zeros(3, dtype=torch.float64)
        has_own = self._meeting.own_models
        if has_own:
            for worker, module in enumerate(self._stack.modules):
                own += tested(module, test, everything[worker :: self._workers], precision)
        means = self._meeting.means()
        put_means_(self._mean, means, self._stack)
        if self._train.statistics == "reestimate":
            self._reestimate(done)
        sums = tested(self._mean, test, everything, precision)
        loss, accuracy = (sums[:2] / sums[2:].clamp(min=1)).tolist()
        own_loss, own_accuracy = (own[:2] / own[2:].clamp(min=1)).tolist()
        return EvalDone(
            step=done,
            epoch=(done - 1) // self._epoch_steps,
            loss=loss,
            accuracy=accuracy,
            own_loss=own_loss if has_own else None,
            own_accuracy=own_accuracy if has_own else None,
            apart=self._stack.apart(means) if has_own else None,
        )

    def _reestimate(self, done: int) -> None:
        look = Look(self._train, self._prepared.source, self._config.run.seed, done, self._workers)
        learn_statistics(
            self._mean,
            look,
            range(self._workers),
            lambda inputs: forward_in(self._train.precision, self._mean, inputs),
        )

    def _share(self, step: int, worker: int) -> Share:
        epoch, step_in_epoch = divmod(step, self._pass_steps)
        return step_share(
            step_in_epoch,
            batch=self._train.batch,
            rank=worker,
            size=self._workers,
            num_samples=self._prepared.source.num_samples,
            seed=self._config.run.seed,
            epoch=epoch,
        )

    def _dealt(self, step: int, batch: LoadedShare) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each worker's part of a step's samples."""
        sizes = [len(self._share(step, worker).samples) for worker in range(self._workers)]
        if sum(sizes) != len(batch.inputs):
            raise StrettoError(
                f"step {step + 1}: {sum(sizes) - len(batch.inputs)} samples could not be read; "
                "virtual workers cannot tell whose they were: mend the data, see stretto train"
            )
        return zip(batch.inputs.split(sizes), batch.targets.split(sizes), strict=True)


def check_virtual(config: RunConfig, workers: int) -> int:
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
    parties = count_parties(config.strategy, workers)
    if parties > 1 and isinstance(config.optim, LARSConfig) and config.optim.norm_group > 1:
        raise ConfigError(
            f"optim.norm_group = {config.optim.norm_group}: each virtual worker takes norms of its "
            "own; only ranks, in stretto train, can share them: leave norm_group out"
        )
    return parties
