"""Batch statistics for evaluation, taken anew from training samples with the weights as they are.

Running averages lag behind weights that change fast, and those of a small micro-batch are noisy.
Here all ranks together look at a few batches, as training would see them, and leave no trace:
samples are a function of the step alone, and the caller puts each rank's buffers back (`settled`).

Note "the variance of all samples". It is the mean of the batches' variances *plus* the variance of
their means (the law of total variance, each weighed by its samples). The plain mean of variances
leaves out the second part: images of a batch differ less from their own mean than from that of all,
most where a batch has few of them. With both parts the result is that of one rank which saw the
same batches, whatever the number of ranks.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stretto.comm.small import add_up_
from stretto.data.loader import Prefetch
from stretto.data.order import Share, sample_at, steps_per_epoch
from stretto.data.source import Source
from stretto.train.config import TrainConfig
from stretto.train.parts import Parts
from stretto.train.step import forward, seed_randomness


@torch.no_grad()
def reestimate(parts: Parts, done: int) -> None:
    """Give batch norms the statistics of some training samples, after ``done`` steps.

    All ranks call this together, inside `settled`, and leave with equal buffers; those of other
    layers are what they were. A model without batch norms is not run at all.
    """
    look = Look(parts.config, parts.source, parts.seed, done, parts.channel.size)
    learn_statistics(
        parts.model,
        look,
        [parts.channel.rank],
        lambda inputs: forward(parts, inputs),
        lambda sums: add_up_(sums, parts.channel),
    )


@dataclass(frozen=True, slots=True)
class Look:
    """Which training samples ranks look at, and what is drawn meanwhile."""

    config: TrainConfig
    source: Source
    seed: int
    done: int
    """Steps of training before it."""
    size: int

    def shares(self, rank: int) -> Iterator[Share]:
        """Yield a rank's micro-batches, from an order that belongs to ``done`` steps.

        They are numbered over all ranks, and a number says which samples: another number of ranks
        looks at the same ones, in the same batches, if it looks at as many.
        """
        num_samples = self.source.num_samples
        share = -(-self.config.batch // self.size)
        length = -(-share // self.config.pieces(self.size))
        pass_steps = steps_per_epoch(num_samples, self.config.batch)
        for index in range(self.config.statistics_batches):
            start = self.number(index, rank) * length
            positions = np.arange(start, start + length, dtype=np.int64) % num_samples
            # Passes of training count from 0: an order with a number below that is nobody else's.
            samples = sample_at(
                positions, num_samples=num_samples, seed=self.seed, epoch=-self.done - 1
            )
            yield Share(samples, epoch=max(self.done - 1, 0) // pass_steps)

    def number(self, index: int, rank: int) -> int:
        """Return the number of a rank's micro-batch among those of all."""
        return index * self.size + rank


def learn_statistics(
    model: nn.Module,
    look: Look,
    ranks: Iterable[int],
    forward_of: Callable[[Tensor], Tensor],
    add_up: Callable[[Tensor], None] = lambda _sums: None,
) -> None:
    """Give batch norms the statistics of what ``ranks`` look at here, and others elsewhere.

    ``add_up`` makes sums of this process those of all.
    """
    norms = (layer for layer in model.modules() if isinstance(layer, _BatchNorm))
    layers = [_Sums(layer) for layer in norms if layer.running_mean is not None]
    if not layers:
        return
    with _undisturbed(model), _listening(layers):
        model.train()
        for rank in ranks:
            with Prefetch(look.source, look.shares(rank)) as batches:
                for index, batch in enumerate(batches):
                    if len(batch.inputs):
                        seed_randomness(look.seed, look.done, look.number(index, rank), 0)
                        forward_of(batch.inputs)
    sums = torch.cat([each.flat().cpu() for each in layers])
    add_up(sums)
    for each, total in zip(layers, sums.split([each.length for each in layers]), strict=True):
        each.settle(total)


@dataclass(slots=True, eq=False)
class _Sums:
    """What one batch norm saw: how many values of a channel, their sum, the sum of their squares.

    In float64, where the square of a mean can be taken off without loss.
    """

    layer: _BatchNorm
    count: float = 0.0
    moments: Tensor | float = 0.0
    """[2, channels] as soon as there was a batch."""

    def add(self, _layer: nn.Module, inputs: tuple[Tensor, ...], _outputs: object) -> None:
        """Take in a batch after its forward: with momentum 1 the running statistics are its own."""
        mean, variance = (s.double() for s in self._running())
        count = inputs[0].numel() // len(mean)
        # The running variance is that of a larger whole, estimated: divided by count - 1.
        squares = variance * ((count - 1) / count) + mean.square()
        self.count += count
        self.moments = self.moments + count * torch.stack([mean, squares])

    @property
    def length(self) -> int:
        """Numbers in `flat`."""
        return 1 + 2 * len(self._running()[0])

    def flat(self) -> Tensor:
        """Return everything as numbers that ranks may add up."""
        flat = self._running()[0].new_zeros(self.length, dtype=torch.float64)
        flat[0] = self.count
        flat[1:].view(2, -1).add_(self.moments)
        return flat

    def settle(self, total: Tensor) -> None:
        """Set the layer's statistics from the sums of all ranks; without samples they stay."""
        count = float(total[0])
        if not count:
            return
        mean, squares = total[1:].view(2, -1) / count
        variance = (squares - mean.square()).clamp_(min=0) * (count / max(count - 1, 1))
        for running, value in zip(self._running(), (mean, variance), strict=True):
            running.copy_(value)

    def _running(self) -> tuple[Tensor, Tensor]:
        mean, variance = self.layer.running_mean, self.layer.running_var
        assert mean is not None, "a layer without statistics has nothing to settle"
        assert variance is not None, "it has both or none"
        return mean, variance


@contextmanager
def _listening(layers: Sequence[_Sums]) -> Iterator[None]:
    """Show each layer's sums every batch that goes through it."""
    hooks = [each.layer.register_forward_hook(each.add) for each in layers]
    momenta = [each.layer.momentum for each in layers]
    try:
        for each in layers:
            each.layer.momentum = 1.0
            each.layer.reset_running_stats()  # what is not finite would stay so, even times 0
        yield
    finally:
        for each, hook, momentum in zip(layers, hooks, momenta, strict=True):
            hook.remove()
            each.layer.momentum = momentum


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Put back all buffers and the state of all random numbers after the block."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng({b.device.index for b, _ in buffers if b.is_cuda}):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for buffer, before in buffers:
            buffer.copy_(before)
