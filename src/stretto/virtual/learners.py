"""What each virtual worker does by itself: its samples, forward and backward of its own module."""

import copy
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from stretto.data.loader import LoadedShare
from stretto.data.order import Share, step_share, steps_per_epoch
from stretto.errors import StrettoError
from stretto.model import per_sample_loss
from stretto.run import Prepared, RunConfig, derived_for
from stretto.train.parts import count_epoch_steps, count_steps
from stretto.train.step import forward_in, seed_randomness
from stretto.virtual.stack import Stack

Part = tuple[Tensor, Tensor]
"""A worker's inputs and targets of one step."""


class Learners:
    """Workers with their models and their shares of the data."""

    def __init__(
        self,
        config: RunConfig,
        prepared: Prepared,
        workers: int,
        parties: int,
        device: torch.device,
    ) -> None:
        self.config, self.prepared, self.workers = config, prepared, workers
        self.device = device
        self.model = copy.deepcopy(prepared.model).to(device)
        """Like everybody's at the beginning."""
        source = prepared.source
        self.total_steps = count_steps(config.train, source.num_samples)
        self.epoch_steps = count_epoch_steps(config.train, source.num_samples)
        self._pass_steps = steps_per_epoch(source.num_samples, config.train.batch)
        self.derived = derived_for(config, source.num_samples)
        self.stack = Stack(self.model, workers, parties)

    def shares(self) -> Iterator[Share]:
        """Yield the samples of each step, worker after worker."""
        for step in range(self.total_steps):
            of_workers = [self._share(step, worker) for worker in range(self.workers)]
            samples = np.concatenate([share.samples for share in of_workers])
            yield Share(samples, of_workers[0].epoch)

    def dealt(self, step: int, batch: LoadedShare) -> list[Part]:
        """Return each worker's part of a step's samples.

        Raises:
            StrettoError: Some of them could not be read.
        """
        sizes = [len(self._share(step, worker).samples) for worker in range(self.workers)]
        if sum(sizes) != len(batch.inputs):
            raise StrettoError(
                f"step {step + 1}: {sum(sizes) - len(batch.inputs)} samples could not be read; "
                "virtual workers cannot tell whose they were: mend the data, see stretto train"
            )
        inputs, targets = (t.to(self.device) for t in (batch.inputs, batch.targets))
        return list(zip(inputs.split(sizes), targets.split(sizes), strict=True))

    def learn(self, step: int, worker: int, part: Part, num_samples: int) -> float:
        """Add one worker's gradients to its model's; return what its losses add up to.

        Those of a model are of the mean over its own samples, weighed by how many these are of
        the step's ``num_samples``: the mean of all models' is that of the global batch.
        """
        train = self.config.train
        inputs, targets = part
        sizes = train.piece_sizes(len(inputs), self.workers)
        total = 0.0
        pieces = zip(inputs.split(sizes), targets.split(sizes), strict=True)
        for micro, (some, wanted) in enumerate(pieces):
            if len(some):
                loss = self._loss(step, micro, worker, some, wanted)
                total += float(loss.detach())
                (loss * (self.stack.parties / num_samples)).backward()
        return total

    def _loss(self, step: int, micro: int, worker: int, inputs: Tensor, targets: Tensor) -> Tensor:
        train = self.config.train
        seed_randomness(self.config.run.seed, step, micro, worker)
        outputs = forward_in(train.precision, self.stack.modules[worker], inputs)
        return per_sample_loss(outputs, targets, train.label_smoothing).sum()

    def _share(self, step: int, worker: int) -> Share:
        epoch, step_in_epoch = divmod(step, self._pass_steps)
        return step_share(
            step_in_epoch,
            batch=self.config.train.batch,
            rank=worker,
            size=self.workers,
            num_samples=self.prepared.source.num_samples,
            seed=self.config.run.seed,
            epoch=epoch,
        )
