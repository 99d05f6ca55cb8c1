"""Virtual workers that step together: every step of one is a step of all."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from stretto.data.loader import LoadedShare
from stretto.optim import stacked_optimizer
from stretto.virtual.learners import Learners, Part
from stretto.virtual.meetings import build_meeting
from stretto.virtual.repeated import RECORDS, Repeated


class InStep:
    """One optimizer updates all models at once, and then they meet, as ranks would by messages."""

    def __init__(self, learners: Learners, lost: float = 0.0) -> None:
        """Make it; a share of ``lost`` messages never arrives."""
        self._learners, self._stack = learners, learners.stack
        config, model = learners.config, learners.model
        self._optimizer = stacked_optimizer(
            config.optim, model, self._stack.values, peak_lr=learners.derived.lr
        )
        self._meeting = build_meeting(config.strategy, model, self._stack, self._optimizer, lost)
        self.own_models = self._meeting.own_models
        self._repeated: Repeated | None = None

    def steps(self, batches: Iterable[LoadedShare]) -> Iterator[float]:
        """Take step after step; yield the mean loss of each, when all have taken it."""
        for step, batch in enumerate(batches):
            parts = self._learners.dealt(step, batch)
            loss = self._learn(step, parts) / len(batch.inputs)
            if math.isfinite(loss):
                self._update(step)
            yield loss

    def means(self) -> dict[str, Tensor]:
        """Return the mean of all models, what is under way included, by name."""
        return self._meeting.means()

    def _learn(self, step: int, parts: Sequence[Part]) -> float:
        """Give all models their gradients; return what the losses of all samples add up to."""
        learners = self._learners
        if (record := RECORDS.get(learners.device.type)) is not None:
            self._repeated = self._repeated or Repeated(learners, parts, record)
            if self._repeated.fits(parts):
                return self._repeated.learn(parts)
        self._stack.rows.clear_gradients()
        num_samples = sum(len(inputs) for inputs, _ in parts)
        each = enumerate(parts)
        return sum(learners.learn(step, worker, part, num_samples) for worker, part in each)

    @torch.no_grad()
    def _update(self, step: int) -> None:
        lr = self._learners.derived.rate_at(step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if (limit := self._learners.config.train.clip_norm) is not None:
            self._stack.rows.clip_gradients_(limit)
        self._meeting.before_update()
        self._optimizer.step()
        self._meeting.after_update(step, lr)
