"""AD-PSGD: every rank steps by its own gradients, and pairs average beside the steps.

::

    begin            the step's parameters are what the live model is now
    forward, backward   meanwhile peers may average with the live model
    optimizer.step   on the live model as it is by then
    after_update     an active rank visits a peer, beside the next step

Even ranks are active, odd ones passive; see `stretto.strategy.adpsgd.sides`. The loop divides its
loss by the samples of all ranks; times the number of ranks that is this rank's own mean, weighed by
its samples: the mean of all ranks' steps is the step of the global batch.
"""

import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.comm.channel import Channel
from stretto.comm.spread import average_, spread_from_rank_0_
from stretto.errors import ConfigError
from stretto.strategy.adpsgd.config import ADPSGDConfig
from stretto.strategy.adpsgd.live import Live
from stretto.strategy.adpsgd.sides import LANE, Side, Turn, side_of
from stretto.strategy.base import Agreed, MakeOptimizer
from stretto.strategy.buffers import Buffers
from stretto.strategy.own import Own, OwnModels, own_means_, under
from stretto.telemetry.timeline import Recorder
from stretto.topology.random_events import Act


class ADPSGD(OwnModels):
    """A model on every rank, and averages of two that wait for no step."""

    def __init__(
        self,
        config: ADPSGDConfig,
        channel: Channel,
        recorder: Recorder | None = None,
        *,
        own_means: bool = False,
    ) -> None:
        """Make it; ``own_means`` says that the loss is a mean over the rank's own samples."""
        self.reads_gradients = False
        self.sound: Callable[[], bool] = lambda: True
        self.turn: Turn = lambda _act: nullcontext()
        """Where somebody sets an order, what each act waits for; to be set before `attach`."""
        self._config = config
        self._channel = channel
        self._recorder = recorder or Recorder(channel.rank)
        self._factor = 1.0 if own_means else float(channel.size)
        self._hooks: list[RemovableHandle] = []
        self._side: Side | None = None
        self._step = 0
        self._is_open = self._is_fresh = False
        self._waited_s = 0.0
        self._updating = ExitStack()

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Give every rank the weights of rank 0; let updates be made on the live model."""
        _refuse_gpu(model)
        spread_from_rank_0_([*model.parameters(), *model.buffers()], self._channel)
        self._channel.reserve(1 + LANE)
        self._buffers = Buffers(model)
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._own = Own([p for _, p in self._named])
        self._live = Live([p for _, p in self._named])
        whom = partial(self._config.whom, self._channel.rank, self._channel.size)
        self._side = side_of(self._channel, self._live, whom, self.turn)
        self._hooks.append(model.register_forward_pre_hook(self._reads_before(model)))
        self._optimizer = make_optimizer(model.parameters())
        self._hooks.append(self._optimizer.register_step_pre_hook(lambda *_: self._before_step()))
        self._hooks.append(self._optimizer.register_step_post_hook(lambda *_: self._after_step()))
        return model, self._optimizer

    def begin(self, step: int, micro: int, last_micro: bool, lr: float) -> None:
        """Take the live model as it is, once a step."""
        self._step = step
        self._read()

    def after_backward(self, *, update: bool = True) -> Agreed:
        """Make gradients those of this rank's own mean; the loop updates by them."""
        gradients = own_means_([p for _, p in self._named], self._factor)
        waited_s, self._waited_s = self._waited_s, 0.0
        return Agreed(gradients, waited_s=waited_s)

    def after_update(self) -> None:
        """Begin a visit, if this rank is active; the one before has had a step's time to end."""
        began_s = time.monotonic()
        with self._recorder.span("wait for peers", "wait", step=self._step):
            self._running().visit(self._step)
        self._waited_s += time.monotonic() - began_s
        self._is_fresh = False

    def settle(self) -> None:
        """Let all averages come to their end, and make the model the mean of all ranks'."""
        self._go_on()
        self._running().rest()
        self._live.give()
        self._is_open = False
        means = self._own.now()
        average_(means, self._channel)
        self._own.lay_aside(means)
        self._buffers.settle(self._channel)

    def close(self) -> None:
        """Take the hooks off the model and its optimizer, and end threads."""
        for hook in self._hooks:
            hook.remove()
        if self._side is not None:
            self._side.close()

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """Return this rank's gradients, last layers first."""
        return [(name, p.grad) for name, p in reversed(self._named) if p.grad is not None]

    def own_state(self) -> dict[str, Tensor]:
        """Return this rank's model and what its optimizer remembers; all together, settled."""
        return self._kept()

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Take it back; nothing: all begin from one model. All together, settled."""
        self._own.take_back()
        if under(state, "parameters"):
            self._take_kept(state)

    def _running(self) -> Side:
        assert self._side is not None, "attach comes first"
        return self._side

    def _go_on(self) -> None:
        """Let the live model be what the parameters are, and peers come, unless they may."""
        if not self._is_open:
            self._own.take_back()
            self._live.take()
            self._running().open()
            self._is_open = True

    def _read(self) -> None:
        """Make the step's parameters what the live model is; once a step."""
        self._go_on()
        if not self._is_fresh:
            with self.turn(Act.READ), self._live.lock:
                self._live.give()
            self._is_fresh = True

    # A function, not a method, and for one module: a copy of the model has the hook as well.
    def _reads_before(self, model: nn.Module) -> Callable[..., None]:
        mine = weakref.ref(model)

        def before_forward(module: nn.Module, _inputs: object) -> None:
            if module is mine() and torch.is_grad_enabled():
                self._read()

        return before_forward

    def _before_step(self) -> None:
        """Let the optimizer find the live model, which stays as it is until it has stepped."""
        self._go_on()
        self._updating.enter_context(self.turn(Act.APPLY))
        self._updating.enter_context(self._live.lock)
        self._live.give()
        self._is_fresh = True  # for a forward inside the step: a closure's

    def _after_step(self) -> None:
        self._live.take()
        self._updating.close()


def _refuse_gpu(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise ConfigError(
                f"strategy.kind = 'adpsgd': parameter {name} is on {parameter.device}. Who answers "
                "peers whenever they come would hold up what is queued on a GPU: leave the model "
                "on the CPU, or take 'crossover' or 'sgp' with strategy.delay = 1"
            )
