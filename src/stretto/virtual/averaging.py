"""Averaging of stacked models: does to all replicas what the ranks of a strategy do by messages.

The update rules (`stretto.optim.rules`), the peers of a round (`stretto.topology`) and the settings
are those of real ranks. `stretto.strategies.local_updates` is the counterpart of
`FragmentAveraging`. Gossip is in `stretto.virtual.stacked_gossip`, and the pairwise averages of
AD-PSGD are in `stretto.virtual.stepping`.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.cluster.world import Mesh
from stretto.errors import ConfigError
from stretto.optim.rules import unsqueeze_like
from stretto.program.blocks import cut_fragments
from stretto.strategies import (
    ADPSGDConfig,
    AllReduceConfig,
    AnyStrategyConfig,
    AutoConfig,
    GossipConfig,
    LocalConfig,
    NoLoCoConfig,
    ShardedConfig,
)
from stretto.strategies.gossip.coded_wire import CODECS
from stretto.strategies.gossip.groups import HOSTS, group_of
from stretto.strategies.local_updates_config import AveragedConfig
from stretto.topology.round_peers import stacked_round
from stretto.virtual.stacked_gossip import (
    StackedCodedMixing,
    StackedGossip,
    StackedGradientMixing,
    StackedMixing,
    StackedPushSum,
)
from stretto.virtual.stacked_models import StackedModels


class FragmentAveraging:
    """Local SGD, SlowMo, DiLoCo and NoLoCo on stacked models, fragment by fragment."""

    replicas_differ = True

    def __init__(
        self, config: LocalConfig, model: nn.Module, stack: StackedModels, optimizer: Optimizer
    ) -> None:
        self._config, self._stack, self._optimizer = config, stack, optimizer
        cut = cut_fragments(model, config.streaming().fragments)
        self._fragments = [
            _Fragment(fragment_turn, [stack.values[name] for name, _ in named])
            for fragment_turn, named in cut
        ]

    def after_backward(self, step: int) -> None:
        """Do nothing."""

    def before_update(self) -> None:
        """Do nothing."""

    @torch.no_grad()
    def after_update(self, step: int, lr: float) -> None:
        """Complete the rounds that end with ``step``, then start a round of the fragments due."""
        self._complete_rounds(step, lr)
        fragment_turn = self._config.fragment_turn(step)
        for fragment in self._fragments:
            if fragment.fragment_turn == fragment_turn:
                fragment.send(step, self._outer_gradient(fragment, step // self._config.every))
        self._complete_rounds(step, lr)

    def means(self) -> dict[str, Tensor]:
        """Return the mean of all replicas, by parameter name."""
        return self._stack.means()

    def _outer_gradient(self, fragment: "_Fragment", round_number: int) -> list[Tensor]:
        """Return each replica's start of the round minus the current mean of its peers."""
        if not isinstance(self._config, NoLoCoConfig):
            steps = [start - now for start, now in fragment.start_and_current()]
            return [step.mean(dim=0, keepdim=True).expand_as(step).clone() for step in steps]
        found = stacked_round(
            self._config.build_topology(),
            self._stack.num_replicas,
            round_number,
            fragment.fragment_turn,
        )
        outer_gradient = []
        for start, now in fragment.start_and_current():
            self_weight, weights = (
                torch.as_tensor(a).to(now) for a in (found.self_weight, found.weights)
            )
            mean = now * unsqueeze_like(self_weight, now)
            for column, weight in zip(found.who.T, weights.unbind(1), strict=True):
                mean += now[column] * unsqueeze_like(weight, now)
            outer_gradient.append(start - mean)
        return outer_gradient

    def _complete_rounds(self, step: int, lr: float) -> None:
        streaming, outer = self._config.streaming(), self._config.outer()
        for fragment in self._fragments:
            if fragment.sent_step is None or step - fragment.sent_step < streaming.delay:
                continue
            outer.rule(fragment.starts, fragment.momenta, fragment.outer_gradient, lr)
            fragment.finish_round(streaming.mix)
            if self._config.reset_momentum:
                self._zero_momentum(fragment)

    def _zero_momentum(self, fragment: "_Fragment") -> None:
        for value in fragment.values:
            buffer = self._optimizer.state.get(value, {}).get("momentum_buffer")
            if isinstance(buffer, Tensor):
                buffer.zero_()


class _Fragment:
    """One fragment of all replicas: parameters at the start of its round, and a round in flight."""

    def __init__(self, fragment_turn: int, values: list[nn.Parameter]) -> None:
        self.fragment_turn, self.values = fragment_turn, values
        self.starts = [
            v.detach().to(torch.promote_types(v.dtype, torch.float32), copy=True) for v in values
        ]
        self.momenta = [torch.zeros_like(start) for start in self.starts]
        self.sent_step: int | None = None
        self.outer_gradient: list[Tensor] = []

    def start_and_current(self) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of parameters: at the start of the round, and now."""
        now = [v.detach().to(s.dtype) for v, s in zip(self.values, self.starts, strict=True)]
        return list(zip(self.starts, now, strict=True))

    def send(self, step: int, outer_gradient: list[Tensor]) -> None:
        """Put ``outer_gradient``, computed after ``step``, in flight."""
        self.sent_step, self.outer_gradient = step, outer_gradient

    def finish_round(self, mix: float) -> None:
        """Move the parameters by the share ``mix`` towards the new start; clear the round."""
        for value, (start, now) in zip(self.values, self.start_and_current(), strict=True):
            value.copy_(start if mix == 1 else now.lerp(start, mix))
        self.sent_step, self.outer_gradient = None, []


class Averaging(Protocol):
    """How a strategy averages stacked models before and after an update."""

    replicas_differ: bool
    """Whether the strategy keeps replicas that may differ; true even where there is only one."""

    def after_backward(self, step: int) -> None:
        """Average the gradients of ``step``, if that is what replicas exchange."""
        ...

    def before_update(self) -> None:
        """Turn the parameters into the values that the optimizer updates."""
        ...

    def after_update(self, step: int, lr: float) -> None:
        """Undo `before_update`, then average replicas if ``step`` ends with a round."""
        ...

    def means(self) -> dict[str, Tensor]:
        """Return the mean of all replicas, in-flight rounds included, by parameter name."""
        ...


class NoAveraging:
    """One replica that all workers share: nothing is averaged."""

    replicas_differ = False

    def __init__(self, stack: StackedModels) -> None:
        self._stack = stack

    def after_backward(self, step: int) -> None:
        """Do nothing: the gradients are those of the whole batch."""

    def before_update(self) -> None:
        """Do nothing."""

    def after_update(self, step: int, lr: float) -> None:
        """Do nothing."""

    def means(self) -> dict[str, Tensor]:
        """Return the parameters of the one replica, by name."""
        return {name: value.detach()[0] for name, value in self._stack.values.items()}


def count_replicas(config: AnyStrategyConfig, workers: int) -> int:
    """Return the number of replicas that ``workers`` virtual workers keep under ``config``.

    Raises:
        ConfigError: Virtual workers do not support these settings, or not this number of workers.
        TypeError: ``config`` is of a class for which virtual workers have no rule.
    """
    _refuse_narrow_wire(config)
    if isinstance(config, AllReduceConfig | ShardedConfig | AutoConfig):  # all exact
        return 1
    if isinstance(config, GossipConfig):
        _check_gossip(config)
        return group_of(0, Mesh((workers,)), config.groups, config.build_topology()).count
    if isinstance(config, ADPSGDConfig | LocalConfig):
        return workers
    raise TypeError(_unknown_config_message(config))


def _refuse_narrow_wire(config: AnyStrategyConfig) -> None:
    """Refuse sums of values that are rounded on the wire: their replicas would not be rounded."""
    settings: dict[str, str] = {}
    if isinstance(config, AllReduceConfig | ShardedConfig | AveragedConfig):
        settings["wire"] = config.wire
    if isinstance(config, ShardedConfig):
        settings["parameters"] = config.parameters
    for name, value in settings.items():
        if value != "own":
            raise ConfigError(
                f'strategy.{name} = "{value}": virtual workers sum without rounding what ranks '
                "send, so their result would be another; leave it out, or train ranks"
            )


def _check_gossip(config: GossipConfig) -> None:
    if config.groups == HOSTS:
        raise ConfigError(
            f"strategy.groups = {HOSTS!r}: virtual workers have no hosts; give a number of groups"
        )


def check_lost_share(config: AnyStrategyConfig, lost: float) -> None:
    """Check that training continues when the share ``lost`` of all messages never arrives.

    Raises:
        ConfigError: ``lost`` is not in [0, 1), or ranks of this strategy wait for every message.
    """
    if not 0 <= lost < 1:
        raise ConfigError(f"share of lost messages {lost:g}: expected 0 or more, and below 1")
    if lost and not isinstance(config, GossipConfig):
        raise ConfigError(
            f'strategy.kind = "{config.kind}" with lost messages: its ranks wait for every message '
            "and connections resend lost ones; only gossip tolerates loss: crossover, dpsgd, sgp"
        )


def build_averaging(
    config: AnyStrategyConfig,
    model: nn.Module,
    stack: StackedModels,
    optimizer: Optimizer,
    lost: float = 0.0,
) -> Averaging:
    """Return the averaging that ``config`` describes, for workers that step together.

    Args:
        config: Settings of the strategy.
        model: The model whose parameters ``stack`` holds; cuts segments and fragments.
        stack: The replicas.
        optimizer: Updates the parameters of ``stack``.
        lost: Share of gossip messages that never arrive, 0 to below 1.

    Raises:
        TypeError: ``config`` is of a class for which there is no averaging. AD-PSGD has none:
            its workers do not step together (`stretto.virtual.stepping.ArrivalOrderWorkers`).
    """
    if isinstance(config, GossipConfig):
        return _gossip_class(config)(config, model, stack, lost)
    if isinstance(config, LocalConfig):
        return FragmentAveraging(config, model, stack, optimizer)
    if isinstance(config, AllReduceConfig | ShardedConfig | AutoConfig):
        return NoAveraging(stack)
    raise TypeError(_unknown_config_message(config))


def _unknown_config_message(config: object) -> str:
    return f"strategy config {type(config).__name__}: virtual workers have no averaging for it"


def _gossip_class(config: GossipConfig) -> type[StackedGossip]:
    if config.is_push_sum:
        return StackedPushSum
    if config.mixes_gradients:
        return StackedGradientMixing
    return StackedCodedMixing if config.wire in CODECS else StackedMixing
