"""`RunParts`: all components of a training run on one rank, assembled by `stretto.run`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from stretto.cluster.world import World
from stretto.comm.transport import Transport
from stretto.data.order import steps_per_epoch
from stretto.data.sample_source import SampleSource
from stretto.strategies import Strategy
from stretto.telemetry.events import EvalDone, Event
from stretto.telemetry.timeline import Recorder
from stretto.train.config import TrainConfig
from stretto.train.early_stop import EarlyStopper
from stretto.train.precision import LossScale


@dataclass(frozen=True, slots=True)
class RunParts:
    """All components of one run on one rank.

    `model` and `optimizer` are those that `Strategy.attach` returned.
    """

    config: TrainConfig
    seed: int
    world: World
    transport: Transport
    model: nn.Module
    optimizer: Optimizer
    strategy: Strategy
    source: SampleSource
    test_source: SampleSource
    rate_at: Callable[[int], float]
    """Step -> learning rate."""
    report: Callable[[Event], None]
    """Publishes an event; does nothing except on rank 0."""
    recorder: Recorder
    notes: Sequence[str] = ()
    """Lines to show before the first step."""
    checkpoints: Path | None = None
    """Folder of checkpoints; None saves none."""
    generation: int = 0
    fixed_settings: Mapping[str, object] = field(default_factory=dict)
    """Settings, by dotted key, that a resumed run may not change."""
    early_stopper: EarlyStopper = field(default_factory=EarlyStopper)
    """Decides whether evaluations have stopped improving."""
    loss_scale: LossScale = field(default_factory=LossScale)
    """Factor of the loss before backward."""

    @property
    def pass_steps(self) -> int:
        """Steps of one pass over the training data, which determine the order of samples."""
        return steps_per_epoch(self.source.num_samples, self.config.batch)

    @property
    def epoch_steps(self) -> int:
        """Steps of one epoch: the interval of counting, evaluating and saving."""
        return count_epoch_steps(self.config, self.source.num_samples)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return count_steps(self.config, self.source.num_samples)

    def num_samples_in_step(self, step: int) -> int:
        """Return the samples of a step over all ranks, if all of them are readable."""
        left = self.source.num_samples - step % self.pass_steps * self.config.batch
        return min(self.config.batch, left)

    def is_due(self, every: int | None, step: int) -> bool:
        """Return whether an action done every ``every`` steps (None: once an epoch) is due now."""
        return self._is_interval_end(every, step + 1) or step + 1 == self.total_steps

    def observe_evaluation(self, result: EvalDone) -> None:
        """Pass an evaluation to early stopping; call it before the checkpoint that includes it.

        An evaluation that takes place only because the run ends does not count. A longer run would
        not have made it.
        """
        if self._is_interval_end(self.config.eval_every, result.step):
            self.early_stopper.observe(result)

    def _is_interval_end(self, every: int | None, steps_done: int) -> bool:
        return steps_done % (every or self.epoch_steps) == 0


def count_steps(config: TrainConfig, num_samples: int) -> int:
    """Return the length of a run in steps."""
    return config.steps or config.epochs * count_epoch_steps(config, num_samples)


def count_epoch_steps(config: TrainConfig, num_samples: int) -> int:
    """Return the length of an epoch in steps."""
    return steps_per_epoch(config.epoch_samples or num_samples, config.batch)
