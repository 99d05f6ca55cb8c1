"""Three lines that distribute an ordinary PyTorch loop.

::

    loader = DataLoader(data, batch_sampler=stretto.share_batches(len(data), batch=64))
    model, optimizer = stretto.distribute(model, lambda p: torch.optim.SGD(p, lr=0.1))
"""

import atexit
import difflib
from collections.abc import Mapping
from functools import cache
from itertools import count
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from stretto.cluster.detect import detect
from stretto.cluster.world import World
from stretto.comm.channel import Channel
from stretto.comm.connect import connect
from stretto.data.order import OrderedBatches
from stretto.errors import ConfigError, StrettoError
from stretto.strategy import (
    STRATEGIES,
    Agreed,
    MakeOptimizer,
    Strategy,
    StrategyConfig,
    build_strategy,
)

_distributed: "WeakKeyDictionary[nn.Module, Strategy]" = WeakKeyDictionary()
_loops: "WeakKeyDictionary[nn.Module, _OwnLoop]" = WeakKeyDictionary()
_calls = count()


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
    ``optimizer.step()``. Gradients are exchanged while backward runs, weighed by the number of
    samples each rank had, and equal on all ranks when backward returns: clip or unscale them as
    on one rank. Started alone, it trains alone.

    Args:
        model: Ends with the weights of rank 0 on every rank; the same object is returned.
        make_optimizer: Called with the parameters once the model is in its final form.
        strategy: How the ranks agree, by one word, or a config that says more.
        accumulation: Backward passes (of equally many samples, each loss divided by their
            number) between two optimizer steps.
        channel: What to talk over; when left out, all ranks of the world.
    """
    config = _config_of(strategy) if isinstance(strategy, str) else strategy
    how = build_strategy(config, channel or _new_channel(model), weigh_samples=True)
    how.reads_gradients = True  # a person may, between backward and step
    loop = _OwnLoop(how, accumulation)
    loop.watch_backward(model)  # before the strategy's own hooks: it must begin before they fire
    model, optimizer = how.attach(model, make_optimizer)
    loop.watch_steps(optimizer)
    atexit.register(how.close)
    _distributed[model], _loops[model] = how, loop
    return model, optimizer


def share_batches(num_samples: int, batch: int, *, seed: int = 0) -> OrderedBatches:
    """Return a batch sampler for a DataLoader: this rank's part of each global ``batch``.

    Every sample is in exactly one rank's part of an epoch; the order is new in each epoch.
    """
    me = world()
    return OrderedBatches(num_samples, batch, rank=me.rank, size=me.size, seed=seed)


def settle(model: nn.Module) -> None:
    """Make a distributed model whole before evaluating or saving it; all ranks call it together.

    Batch statistics are each rank's own until then.
    """
    if model not in _distributed:
        raise ConfigError("settle wants a model that distribute returned")
    _distributed[model].settle()


def clip_norm_(model: nn.Module, most: float) -> float:
    """Scale gradients whose norm is above ``most`` down to it, between backward and step.

    All ranks call it together. It works whatever the strategy; `torch.nn.utils.clip_grad_norm_`
    looks at ``model.parameters()``, where a sharded model has no gradients. Returns the norm.
    """
    if model not in _loops:
        raise ConfigError("clip_norm_ wants a model that distribute returned")
    agreed = _loops[model].agreed
    if agreed is None:
        raise StrettoError(
            "clip_norm_ belongs between the step's last backward and optimizer.step(): the ranks "
            "have not agreed on gradients yet"
        )
    norm = float(agreed.norm())
    agreed.clip_(most)
    return norm


class _OwnLoop:
    """Finds the strategy's moments in a loop that does not know them."""

    def __init__(self, strategy: Strategy, accumulation: int) -> None:
        if accumulation < 1:
            raise ConfigError(f"accumulation = {accumulation}: expected at least 1")
        self._strategy = strategy
        self._accumulation = accumulation
        self._optimizer: Optimizer | None = None
        self._step = 0
        self._micro = 0
        self._in_backward = False
        self._in_closure = False
        self.agreed: Agreed | None = None
        """What the ranks agreed on, from the last backward until the step."""

    def watch_backward(self, model: nn.Module) -> None:
        """Let the first gradient of each backward begin a micro-batch, and its end close it."""

        def gradient_is_there(_parameter: Tensor) -> None:
            if not self._in_backward:
                self._in_backward = True
                self._begin()
                Variable._execution_engine.queue_callback(self._end_of_backward)

        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(gradient_is_there)

    def watch_steps(self, optimizer: Optimizer) -> None:
        """Hang the rest on the optimizer's step."""
        self._optimizer = optimizer
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    def _begin(self) -> None:
        assert self._optimizer is not None
        if self.agreed is not None and not self._in_closure:
            raise StrettoError(
                "backward ran again after the ranks had agreed on its gradients: say how many "
                "backward passes make one step (accumulation=...), then step the optimizer"
            )
        if self.agreed is not None:  # an optimizer may call its closure several times in a step
            self._micro, self.agreed = 0, None
        last = self._micro >= self._accumulation - 1
        lr = float(self._optimizer.param_groups[0]["lr"])
        self._strategy.begin(self._step, self._micro, last, lr)
        self._micro += 1

    def _end_of_backward(self) -> None:
        self._in_backward = False
        if self._micro >= self._accumulation:
            self._agree()

    def _before_step(
        self, _optimizer: Optimizer, args: tuple[object, ...], named: Mapping[str, object]
    ) -> None:
        # A closure runs backward inside the step; without one, all of it has been.
        self._in_closure = bool(args) or named.get("closure") is not None
        if self.agreed is None and not self._in_closure:
            self._agree()

    def _agree(self) -> None:
        self.agreed = self._strategy.after_backward()

    def _after_step(self) -> None:
        self._strategy.after_update()
        self._step += 1
        self._micro = 0
        self.agreed, self._in_closure = None, False


def _new_channel(model: nn.Module) -> Channel:
    """Return a group of its own for each distributed model: their messages never cross."""
    device = "cuda" if any(parameter.is_cuda for parameter in model.parameters()) else "cpu"
    channel = connect(world(), name=f"distribute/{next(_calls)}", device=device)
    atexit.register(channel.close)
    return channel


def _config_of(word: str) -> StrategyConfig:
    if word not in STRATEGIES:
        near = difflib.get_close_matches(word, STRATEGIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no strategy {word!r}{hint} known: {', '.join(STRATEGIES)}")
    return STRATEGIES[word]()
