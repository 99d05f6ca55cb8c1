"""Three lines that distribute an ordinary PyTorch loop.

::

    loader = DataLoader(data, batch_sampler=stretto.share_batches(len(data), batch=64))
    model, optimizer = stretto.distribute(model, lambda p: torch.optim.SGD(p, lr=0.1))
"""

import atexit
import difflib
from functools import cache

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.cluster.detect import detect
from stretto.cluster.world import World
from stretto.comm.channel import Channel
from stretto.comm.connect import connect
from stretto.data.order import OrderedBatches
from stretto.errors import ConfigError
from stretto.strategy import STRATEGIES, MakeOptimizer, Strategy, StrategyConfig, build_strategy


@cache
def world() -> World:
    """Return who this process is: rank, size, host, found from torchrun or nothing."""
    return detect()


def distribute(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    strategy: str | StrategyConfig = "allreduce",
    *,
    accumulation: int = 1,
    channel: Channel | None = None,
) -> tuple[nn.Module, Optimizer]:
    """Make ``model`` one model over all ranks; return it and its optimizer, both ordinary.

    The loop stays as it is: forward, a loss that is the *mean* over the local batch, backward,
    ``optimizer.step()``. Gradients are exchanged while backward runs and weighed by the number of
    samples each rank had. Started alone, it trains alone.

    Args:
        model: Ends with the weights of rank 0 on every rank; the same object is returned.
        make_optimizer: Called with the parameters once the model is in its final form.
        strategy: How the ranks agree, by one word, or a config that says more.
        accumulation: Backward passes (one forward each, of equally many samples, each loss divided
            by their number) between two optimizer steps.
        channel: What to talk over; when left out, all ranks of the world.
    """
    config = _config_of(strategy) if isinstance(strategy, str) else strategy
    how = build_strategy(config, channel or _channel(), weigh_samples=True)
    model, optimizer = how.attach(model, make_optimizer)
    _Moments(how, model, optimizer, accumulation)
    return model, optimizer


def share_batches(num_samples: int, batch: int, *, seed: int = 0) -> OrderedBatches:
    """Return a batch sampler for a DataLoader: this rank's part of each global ``batch``.

    Every sample is in exactly one rank's part of an epoch; the order is new in each epoch.
    """
    me = world()
    return OrderedBatches(num_samples, batch, rank=me.rank, size=me.size, seed=seed)


class _Moments:
    """Hangs the strategy's moments on the model's forward and the optimizer's step."""

    def __init__(
        self, strategy: Strategy, model: nn.Module, optimizer: Optimizer, accumulation: int
    ) -> None:
        self._strategy = strategy
        self._optimizer = optimizer
        self._accumulation = accumulation
        self._step = 0
        self._micro = 0
        model.register_forward_pre_hook(self._before_forward)
        optimizer.register_step_pre_hook(lambda *_: self._before_step())
        optimizer.register_step_post_hook(lambda *_: self._after_step())
        atexit.register(strategy.close)

    def _before_forward(self, module: nn.Module, _inputs: object) -> None:
        if module.training and torch.is_grad_enabled():
            last = self._micro >= self._accumulation - 1
            lr = float(self._optimizer.param_groups[0]["lr"])
            self._strategy.begin(self._step, self._micro, last, lr)
            self._micro += 1

    def _before_step(self) -> None:
        self._strategy.after_backward()

    def _after_step(self) -> None:
        self._strategy.after_update()
        self._step += 1
        self._micro = 0


@cache
def _channel() -> Channel:
    channel = connect(world())
    atexit.register(channel.close)
    return channel


def _config_of(word: str) -> StrategyConfig:
    if word not in STRATEGIES:
        near = difflib.get_close_matches(word, STRATEGIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no strategy {word!r}{hint} known: {', '.join(STRATEGIES)}")
    return STRATEGIES[word]()
