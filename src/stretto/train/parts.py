"""Everything a training run is made of, assembled by `stretto.run` and used by the loop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from stretto.cluster.world import World
from stretto.comm.channel import Channel
from stretto.data.order import steps_per_epoch
from stretto.data.source import Source
from stretto.strategy import Strategy
from stretto.telemetry.events import EvalDone, Event
from stretto.telemetry.timeline import Recorder
from stretto.train.config import TrainConfig
from stretto.train.early_stop import Watch
from stretto.train.precision import LossScale


@dataclass(frozen=True, slots=True)
class Parts:
    """The pieces of one run on one rank; `model` and `optimizer` come from `Strategy.attach`."""

    config: TrainConfig
    seed: int
    world: World
    channel: Channel
    model: nn.Module
    optimizer: Optimizer
    strategy: Strategy
    source: Source
    test_source: Source
    rate_at: Callable[[int], float]
    """Step -> learning rate."""
    report: Callable[[Event], None]
    """Takes events; does nothing except on rank 0."""
    recorder: Recorder
    notes: Sequence[str] = ()
    """What people should know before the first step."""
    checkpoints: Path | None = None
    """Where checkpoints go; None keeps none."""
    generation: int = 0
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Settings, by dotted key, that a resumed run may not change."""
    watch: Watch = field(default_factory=Watch)
    """Says when evaluations have not become better for long enough."""
    scale: LossScale = field(default_factory=LossScale)
    """What losses are multiplied by before backward."""

    @property
    def pass_steps(self) -> int:
        """Steps of one pass over the training data: what the order of samples follows."""
        return steps_per_epoch(self.source.num_samples, self.config.batch)

    @property
    def epoch_steps(self) -> int:
        """Steps of one epoch: the rhythm of counting, evaluating and saving."""
        return count_epoch_steps(self.config, self.source.num_samples)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return count_steps(self.config, self.source.num_samples)

    def samples_of(self, step: int) -> int:
        """Return the samples of a step over all ranks, could all of them be read."""
        left = self.source.num_samples - step % self.pass_steps * self.config.batch
        return min(self.config.batch, left)

    def is_due(self, every: int | None, step: int) -> bool:
        """Say whether something done every so often (None: once an epoch) is due after ``step``."""
        return self._in_rhythm(every, step + 1) or step + 1 == self.total_steps

    def judge(self, result: EvalDone) -> None:
        """Let early stopping see an evaluation, before a checkpoint is saved that should know it.

        The one that only the end of the run brought about does not count: had the run been
        longer, there would have been none.
        """
        if self._in_rhythm(self.config.eval_every, result.step):
            self.watch.see(result)

    def _in_rhythm(self, every: int | None, done: int) -> bool:
        return done % (every or self.epoch_steps) == 0


def count_steps(config: TrainConfig, num_samples: int) -> int:
    """Return the length of a run in steps."""
    return config.steps or config.epochs * count_epoch_steps(config, num_samples)


def count_epoch_steps(config: TrainConfig, num_samples: int) -> int:
    """Return the length of an epoch in steps."""
    return steps_per_epoch(config.epoch_samples or num_samples, config.batch)
