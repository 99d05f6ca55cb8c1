"""How stacked models meet: what a strategy's ranks do with messages, done to all parties at once.

The rules are those of real ranks (`stretto.optim.combining`, `stretto.optim.outer`), and so are the
values that say who meets whom and when (`stretto.topology`, the strategy's own settings).
"""

from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.cluster.world import Mesh
from stretto.errors import ConfigError
from stretto.strategy import (
    AllReduceConfig,
    AnyStrategyConfig,
    GossipConfig,
    LocalConfig,
    ShardedConfig,
)
from stretto.strategy.gossip.coded import CODECS
from stretto.strategy.gossip.group import HOSTS, group_of
from stretto.virtual.gossip import Coded, Exchanges, Mixed, Pushed
from stretto.virtual.local import Rounds
from stretto.virtual.stack import Stack


class Meeting(Protocol):
    """What happens to stacked models around an update."""

    own_models: bool
    """Whether parties have models of their own, be it only one."""

    def before_update(self) -> None:
        """Make values those that an update is made on."""
        ...

    def after_update(self, step: int, lr: float) -> None:
        """Undo that; let parties meet, where it is time to."""
        ...

    def means(self) -> dict[str, Tensor]:
        """Return the mean of all parties, what is under way included, by name."""
        ...


class Synchronous:
    """One model, of all workers: there is nobody to meet."""

    own_models = False

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def before_update(self) -> None:
        """Do nothing."""

    def after_update(self, step: int, lr: float) -> None:
        """Do nothing."""

    def means(self) -> dict[str, Tensor]:
        """Return the model."""
        return {name: value.detach()[0] for name, value in self._stack.values.items()}


def count_parties(config: AnyStrategyConfig, workers: int) -> int:
    """Return how many models ``workers`` have between them.

    Raises:
        ConfigError: Workers cannot meet like this, at this number of them.
    """
    if isinstance(config, AllReduceConfig | ShardedConfig):
        return 1
    if isinstance(config, GossipConfig):
        _check_gossip(config)
        return group_of(0, Mesh((workers,)), config.groups, config.who()).count
    return workers


def _check_gossip(config: GossipConfig) -> None:
    if config.mixes_gradients:
        raise ConfigError(
            f'strategy.mix = "{config.mix}": virtual workers mix "parameters" after their update; '
            "only ranks, in stretto train, can mix gradients"
        )
    if config.groups == HOSTS:
        raise ConfigError(
            f"strategy.groups = {HOSTS!r}: virtual workers have no hosts: say how many groups"
        )


def check_lost(config: AnyStrategyConfig, lost: float) -> None:
    """See that workers can go on without a share of ``lost`` messages.

    Raises:
        ConfigError: They wait for every one.
    """
    if not 0 <= lost < 1:
        raise ConfigError(f"a share of {lost:g} of all messages lost: expected 0 to below 1")
    if lost and not isinstance(config, GossipConfig):
        raise ConfigError(
            f'strategy.kind = "{config.kind}" with lost messages: its ranks wait for every one, '
            "and connections send them again; gossip goes on without: crossover, dpsgd, sgp"
        )


def build_meeting(
    config: AnyStrategyConfig,
    model: nn.Module,
    stack: Stack,
    optimizer: Optimizer,
    lost: float = 0.0,
) -> Meeting:
    """Return the meeting of ``config``, for models that ``optimizer`` updates.

    Of gossip's messages a share of ``lost`` never arrives.
    """
    if isinstance(config, GossipConfig):
        return _exchanges(config)(config, model, stack, lost)
    if isinstance(config, LocalConfig):
        return Rounds(config, model, stack, optimizer)
    return Synchronous(stack)


def _exchanges(config: GossipConfig) -> type[Exchanges]:
    if config.pushes:
        return Pushed
    return Coded if config.wire in CODECS else Mixed
