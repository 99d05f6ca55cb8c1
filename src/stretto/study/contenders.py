"""Who takes the training steps that are timed: ours, the peers, and one that talks to nobody."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.comm.buckets import WIRE
from stretto.comm.channel import Channel
from stretto.config.text import suggestion
from stretto.errors import ConfigError
from stretto.measure.ddp import BUCKET_CAPS_MB, Peers
from stretto.measure.interleave import Contender
from stretto.model import per_sample_loss
from stretto.optim import make_optimizer
from stretto.plan.building import with_barrier
from stretto.plan.units import called_modules, find_units
from stretto.plan.value import Plan
from stretto.run import RunConfig
from stretto.strategy import AnyStrategyConfig, Sharded, build_strategy
from stretto.strategy.sharded.config import ShardedConfig, unit_bytes
from stretto.train.precision import HALF

ALONE = "no communication"
DDP, FSDP2, DEEPSPEED = "ddp", "fsdp2", "deepspeed"
NOBODY = "none"


@dataclass(frozen=True, slots=True)
class Stage:
    """What all contenders begin with."""

    config: RunConfig
    channel: Channel
    model: nn.Module
    """Copied by everybody who trains it."""
    batch: tuple[Tensor, Tensor]
    device: str = "cpu"

    def loss(self, model: nn.Module) -> Tensor:
        """Return the mean loss of ``model`` on the batch, in the run's precision."""
        inputs, targets = self.batch
        half = HALF.get(self.config.train.precision)
        with torch.autocast(inputs.device.type, half, enabled=half is not None):
            outputs = model(inputs)
        return per_sample_loss(outputs, targets).mean()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return the run's optimizer for ``model``."""
        return make_optimizer(self.config.optim, model)(model.parameters())


class Plain:
    """An ordinary PyTorch step; what a peer adds happens inside forward and backward."""

    def __init__(self, stage: Stage, model: nn.Module) -> None:
        self._stage, self._model = stage, model
        self._optimizer = stage.optimizer(model)

    def __call__(self) -> None:
        """Take a step."""
        self._stage.loss(self._model).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def rest(self) -> None:
        """Do nothing: the optimizer has waited for everything."""

    def close(self) -> None:
        """Do nothing: there are no threads."""


class Ours:
    """The same step with a strategy's moments in place, as the training loop has them."""

    def __init__(
        self,
        stage: Stage,
        strategy: AnyStrategyConfig | None = None,
        *,
        barrier: bool = False,
    ) -> None:
        self._stage = stage
        own = copy.deepcopy(stage.model)
        with torch.no_grad():
            calls = called_modules(own, lambda: stage.loss(own))
        config = strategy or stage.config.strategy
        self._strategy = build_strategy(config, stage.channel, calls=calls)
        self._strategy.reads_gradients = barrier
        making = make_optimizer(stage.config.optim, own)
        self._model, self._optimizer = self._strategy.attach(own, making)
        self._step = 0

    @property
    def plan(self) -> Plan:
        """What a sharded strategy does, with its barrier."""
        assert isinstance(self._strategy, Sharded)
        plan = self._strategy.plan
        return with_barrier(plan) if self._strategy.reads_gradients else plan

    def __call__(self) -> None:
        """Take a step."""
        lr = self._stage.config.optim.lr or 0.0
        self._strategy.begin(self._step, 0, True, lr)
        (self._stage.loss(self._model) / self._stage.channel.size).backward()
        agreed = self._strategy.after_backward()
        if not agreed.done:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self._strategy.after_update()
        self._step += 1

    def rest(self) -> None:
        """Wait for what the last step left under way."""
        self._strategy.settle()

    def close(self) -> None:
        """End the strategy's threads."""
        self._strategy.close()


def chosen_peers(words: str, config: RunConfig) -> tuple[str, ...]:
    """Return the peers that ``words`` name ("ddp,fsdp2"); without any, those that are like ours.

    "none" is to be timed beside no communication only.

    Raises:
        ConfigError: There is no such peer, or it is not installed.
    """
    named = tuple(word.strip() for word in words.split(",") if word.strip())
    if named == (NOBODY,):
        return ()
    for word in named:
        if word == DEEPSPEED:
            raise ConfigError(f"--peers {word}: {_deepspeed()}")
        if word not in (DDP, FSDP2):
            raise ConfigError(f"no peer {word!r}{suggestion(word, [DDP, FSDP2, NOBODY], 'known')}")
    return named or ((DDP, FSDP2) if isinstance(config.strategy, ShardedConfig) else (DDP,))


def absent_peers(config: RunConfig) -> list[str]:
    """Return a line for each peer that one would look for here and that is not timed."""
    return [_deepspeed()] if isinstance(config.strategy, ShardedConfig) else []


def _deepspeed() -> str:
    if find_spec(DEEPSPEED) is None:
        return "DeepSpeed is not installed: it is not among the peers"
    return "DeepSpeed is installed, but this program cannot drive it: it is not among the peers"


def contenders(
    stage: Stage, peers: Peers, wanted: tuple[str, ...]
) -> dict[str, Callable[[], Contender]]:
    """Return what builds each contender, by name; ours is called as its strategy is."""
    makes: dict[str, Callable[[], Contender]] = {
        ALONE: lambda: Plain(stage, alone(stage)),
        stage.config.strategy.kind: lambda: Ours(stage),
    }
    if DDP in wanted:
        makes |= _ddp(stage, peers)
    if FSDP2 in wanted:
        makes |= _fsdp2(stage)
    return makes


def alone(stage: Stage) -> nn.Module:
    """Return a model that computes in the type that ours does."""
    strategy, model = stage.config.strategy, copy.deepcopy(stage.model)
    half = WIRE[strategy.parameters] if isinstance(strategy, ShardedConfig) else None
    return model if half is None else model.to(half)


def _ddp(stage: Stage, peers: Peers) -> Mapping[str, Callable[[], Contender]]:
    strategy = stage.config.strategy
    half = isinstance(strategy, ShardedConfig) and strategy.wire == "bf16"

    def making(cap: int) -> Callable[[], Contender]:
        return lambda: Plain(stage, peers.ddp(copy.deepcopy(stage.model), cap, half=half))

    return {f"{DDP} {cap} MB{' bf16' * half}": making(cap) for cap in BUCKET_CAPS_MB}


def _fsdp2(stage: Stage) -> Mapping[str, Callable[[], Contender]]:
    from stretto.measure.fsdp import Settings, shard_fully  # takes seconds

    strategy = stage.config.strategy
    like = strategy if isinstance(strategy, ShardedConfig) else ShardedConfig()
    parameters = "bf16" in (stage.config.train.precision, like.parameters)
    gradients = parameters or like.wire == "bf16"

    def making(reshard: bool) -> Callable[[], Contender]:
        settings = Settings(reshard, parameters, gradients, stage.device)

        def make() -> Contender:
            model = copy.deepcopy(stage.model)
            return Plain(stage, shard_fully(model, fsdp2_groups(model, unit_bytes(like)), settings))

        return make

    words = {"resharding": True, "keeping": False}
    tail = " bf16" * gradients
    return {f"{FSDP2} {word}{tail}": making(reshard) for word, reshard in words.items()}


def fsdp2_groups(model: nn.Module, least_bytes: int) -> list[list[nn.Module]]:
    """Return one group for each block of ``model``; smaller neighbours are joined.

    What is used at several places, or read and not called (embeddings of positions), is in none:
    it goes with the whole model, as FSDP2 does with what nobody names.
    """
    from stretto.measure.fsdp import group_up  # takes seconds

    modules = [
        module
        for unit in find_units(model)
        if not unit.used_often
        for module in unit.modules
        if not isinstance(module, nn.Embedding) and module is not model
    ]
    return group_up(modules, least_bytes)
