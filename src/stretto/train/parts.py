"""Everything a training run is made of, assembled by `stretto.run` and used by the loop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from stretto.cluster.world import World
from stretto.comm.channel import Channel
from stretto.data.order import steps_per_epoch
from stretto.data.source import Source
from stretto.strategy import Strategy
from stretto.telemetry.events import Event
from stretto.telemetry.timeline import Recorder
from stretto.train.config import TrainConfig


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
    checkpoints: Path | None = None
    """Where checkpoints go; None keeps none."""
    generation: int = 0
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Settings, by dotted key, that a resumed run may not change."""

    @property
    def epoch_steps(self) -> int:
        """Steps of one epoch."""
        return steps_per_epoch(self.source.num_samples, self.config.batch)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return count_steps(self.config, self.source.num_samples)

    def is_due(self, every: int | None, step: int) -> bool:
        """Say whether something done every so often (None: once an epoch) is due after ``step``."""
        return (step + 1) % (every or self.epoch_steps) == 0 or step + 1 == self.total_steps


def count_steps(config: TrainConfig, num_samples: int) -> int:
    """Return the length of a run in steps."""
    return config.steps or config.epochs * steps_per_epoch(num_samples, config.batch)
