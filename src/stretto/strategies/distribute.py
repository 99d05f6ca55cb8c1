"""Distribute an ordinary PyTorch training loop with three changed lines, one of them an import.

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

from stretto.cluster.detect import detect_world
from stretto.cluster.world import World
from stretto.comm.connect import connect
from stretto.comm.transport import Transport
from stretto.data.order import DistributedBatchSampler
from stretto.errors import ConfigError, StrettoError
from stretto.strategies import (
    STRATEGIES,
    MakeOptimizer,
    StepGradients,
    Strategy,
    StrategyConfig,
    build_strategy,
)

_distributed: "WeakKeyDictionary[nn.Module, Strategy]" = WeakKeyDictionary()
_user_loops: "WeakKeyDictionary[nn.Module, _UserLoop]" = WeakKeyDictionary()
_distribute_calls = count()


@cache
def world() -> World:
    """Return this process's rank, world size and host, from the launcher's environment."""
    return detect_world()


def distribute(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    strategy: str | StrategyConfig = "allreduce",
    *,
    accumulation: int = 1,
    transport: Transport | None = None,
) -> tuple[nn.Module, Optimizer]:
    """Train ``model`` on all ranks; return it and its optimizer, both ordinary PyTorch objects.

    The loop stays as it is: forward, a loss that is the *mean* over the local batch, backward,
    ``optimizer.step()``. Gradients are reduced while backward runs, weighted by the number of
    samples of each rank. They are equal on all ranks when backward returns, so that they can be
    clipped or unscaled as on one rank. A single process trains without communication.

    Args:
        model: Gets the weights of rank 0 on every rank; the same object is returned.
        make_optimizer: Called with the parameters once the model has its final form.
        strategy: The name of a strategy, or its config.
        accumulation: Backward passes for one optimizer step. Each has as many samples as the
            others, and its loss is divided by ``accumulation``.
        transport: Connects the ranks; by default a new one for all ranks of the world.
    """
    config = _default_config(strategy) if isinstance(strategy, str) else strategy
    strategy_object = build_strategy(config, transport or _new_transport(model), weigh_samples=True)
    strategy_object.reads_gradients = True  # the user's loop may read them before the step
    loop = _UserLoop(strategy_object, accumulation)
    # These hooks are set before the strategy's own, because `begin` must run before those fire.
    loop.hook_backward(model)
    model, optimizer = strategy_object.attach(model, make_optimizer)
    loop.hook_optimizer(optimizer)
    atexit.register(strategy_object.close)
    _distributed[model], _user_loops[model] = strategy_object, loop
    return model, optimizer


def share_batches(num_samples: int, batch: int, *, seed: int = 0) -> DistributedBatchSampler:
    """Return a batch sampler for a DataLoader that yields this rank's part of each global batch.

    ``batch`` is the global batch size. Every sample of an epoch goes to exactly one rank; the order
    is shuffled anew in each epoch.
    """
    this_process = world()
    return DistributedBatchSampler(
        num_samples, batch, rank=this_process.rank, size=this_process.size, seed=seed
    )


def consolidate(model: nn.Module) -> None:
    """Make parameters and buffers whole and equal before evaluating or saving (collective call).

    Until then batch statistics differ between ranks, and a sharded model is incomplete.
    """
    if model not in _distributed:
        raise ConfigError("consolidate needs a model that distribute returned")
    _distributed[model].consolidate()


def clip_norm_(model: nn.Module, max_norm: float) -> float:
    """Clip the global gradient norm to ``max_norm`` and return the norm before clipping.

    All ranks call it together, between backward and the optimizer step. It works with every
    strategy; `torch.nn.utils.clip_grad_norm_` reads the gradients of ``model.parameters()``, which
    a sharded model does not have.
    """
    if model not in _user_loops:
        raise ConfigError("clip_norm_ needs a model that distribute returned")
    step_gradients = _user_loops[model].step_gradients
    if step_gradients is None:
        raise StrettoError(
            "clip_norm_ belongs between the step's last backward and optimizer.step(): the "
            "gradients are not reduced yet"
        )
    norm = float(step_gradients.norm())
    step_gradients.clip_(max_norm)
    return norm


class _UserLoop:
    """Calls a strategy from autograd and optimizer hooks, in a loop that does not call it."""

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
        self.step_gradients: StepGradients | None = None
        """The reduced gradients, from the last backward until the optimizer step."""

    def hook_backward(self, model: nn.Module) -> None:
        """Begin a micro-batch with the first gradient of each backward; end it with backward."""

        def on_gradient_ready(_parameter: Tensor) -> None:
            if not self._in_backward:
                self._in_backward = True
                self._begin_micro_batch()
                Variable._execution_engine.queue_callback(self._end_of_backward)

        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(on_gradient_ready)

    def hook_optimizer(self, optimizer: Optimizer) -> None:
        """Call the strategy before and after each step of ``optimizer``."""
        self._optimizer = optimizer
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    def _begin_micro_batch(self) -> None:
        assert self._optimizer is not None
        if self.step_gradients is not None and not self._in_closure:
            raise StrettoError(
                "backward ran again after the gradients were reduced: set the number of backward "
                "passes in one step (accumulation=...), or step the optimizer first"
            )
        if self.step_gradients is not None:
            # An optimizer may call its closure several times in a step.
            self._micro, self.step_gradients = 0, None
        last = self._micro >= self._accumulation - 1
        lr = float(self._optimizer.param_groups[0]["lr"])
        self._strategy.begin(self._step, self._micro, last, lr)
        self._micro += 1

    def _end_of_backward(self) -> None:
        self._in_backward = False
        if self._micro >= self._accumulation:
            self._reduce_gradients()

    def _before_step(
        self, _optimizer: Optimizer, args: tuple[object, ...], named: Mapping[str, object]
    ) -> None:
        # A closure runs backward inside the step. Without one, backward has already ended.
        self._in_closure = bool(args) or named.get("closure") is not None
        if self.step_gradients is None and not self._in_closure:
            self._reduce_gradients()

    def _reduce_gradients(self) -> None:
        self.step_gradients = self._strategy.after_backward()

    def _after_step(self) -> None:
        self._strategy.after_update()
        self._step += 1
        self._micro = 0
        self.step_gradients, self._in_closure = None, False


def _new_transport(model: nn.Module) -> Transport:
    """Return a new transport; each distributed model has its own, so messages never mix."""
    device = "cuda" if any(parameter.is_cuda for parameter in model.parameters()) else "cpu"
    transport = connect(world(), name=f"distribute/{next(_distribute_calls)}", device=device)
    atexit.register(transport.close)
    return transport


def _default_config(kind: str) -> StrategyConfig:
    if kind not in STRATEGIES:
        suggestions = difflib.get_close_matches(kind, STRATEGIES, n=1)
        hint = f"; did you mean {suggestions[0]!r}?" if suggestions else ""
        raise ConfigError(f"no strategy {kind!r}{hint} known: {', '.join(STRATEGIES)}")
    return STRATEGIES[kind]()
