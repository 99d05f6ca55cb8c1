"""AD-PSGD: ranks step with their own gradients while pairs of ranks average asynchronously.

::

    begin               the parameters become a copy of the live model
    forward, backward   meanwhile peers may average with the live model
    optimizer.step      updates the live model, as it is by then
    after_update        an active rank starts to average with a peer, during the next step

Even ranks are active, odd ranks passive; see `stretto.strategies.adpsgd_averaging`. The loop
divides its loss by the samples of all ranks. Multiplied by the number of ranks, the gradients are
means over this rank's samples, weighted by their number: the mean of all ranks' steps is then the
step of the global batch.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.comm.broadcast import all_reduce_mean_, broadcast_
from stretto.comm.transport import Transport
from stretto.config import Config
from stretto.errors import ConfigError
from stretto.strategies.adpsgd_averaging import (
    PAIR_LANE,
    OperationGate,
    PairAverager,
    SharedParameters,
    make_pair_averager,
)
from stretto.strategies.contract import MakeOptimizer, StepGradients
from stretto.strategies.local_state import (
    LocalModelStrategy,
    LocalParameters,
    ModelBuffers,
    pre_hook_of,
    scale_to_rank_mean_,
    select_part,
)
from stretto.telemetry.timeline import Recorder
from stretto.topology.adpsgd_pairs import OperationKind, passive_peer


class ADPSGDConfig(Config):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"adpsgd"``.

    After each of its steps an even rank averages with a random odd one, during the next step; odd
    ranks answer at any time. No rank waits for another rank's step (AD-PSGD, Lian et al., 2018,
    arXiv:1710.06952).
    """

    kind: Literal["adpsgd"] = "adpsgd"
    seed: int = Field(default=0, ge=0)
    """Seed of the random peers."""
    wire: Literal["own"] = "own"
    """The type that parameters are sent as; a narrower one would round them."""

    def peer_of(self, rank: int, size: int, step: int) -> int | None:
        """Return the peer that an active rank averages with after ``step``, or None."""
        return passive_peer(rank, size, step, self.seed)


class ADPSGD(LocalModelStrategy):
    """Trains a model on every rank and averages pairs of models asynchronously."""

    def __init__(
        self,
        config: ADPSGDConfig,
        transport: Transport,
        recorder: Recorder | None = None,
        *,
        loss_is_rank_mean: bool = False,
    ) -> None:
        """Create it; ``loss_is_rank_mean``: the loss is a mean over this rank's samples."""
        self.reads_gradients = False
        self.is_finite: Callable[[], bool] = lambda: True
        self.operation_gate: OperationGate = lambda _operation: nullcontext()
        """Orders operations between ranks, in tests; to be set before `attach`."""
        self._config = config
        self._transport = transport
        self._recorder = recorder or Recorder(transport.rank)
        self._factor = 1.0 if loss_is_rank_mean else float(transport.size)
        self._hooks: list[RemovableHandle] = []
        self._pair_averager: PairAverager | None = None
        self._step = 0
        self._is_averaging = self._parameters_are_current = False
        self._waited_s = 0.0
        self._update_context = ExitStack()

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Broadcast rank 0's weights; hook forward and the optimizer to use the live model."""
        _refuse_gpu(model)
        broadcast_([*model.parameters(), *model.buffers()], self._transport)
        self._transport.reserve(1 + PAIR_LANE)
        self._buffers = ModelBuffers(model)
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._local_parameters = LocalParameters([p for _, p in self._named])
        self._shared = SharedParameters([p for _, p in self._named])
        peer_of = partial(self._config.peer_of, self._transport.rank, self._transport.size)
        self._pair_averager = make_pair_averager(
            self._transport, self._shared, peer_of, self.operation_gate
        )
        self._hooks.append(
            model.register_forward_pre_hook(pre_hook_of(model, self._before_forward))
        )
        self._optimizer = make_optimizer(model.parameters())
        self._hooks.append(self._optimizer.register_step_pre_hook(lambda *_: self._before_step()))
        self._hooks.append(self._optimizer.register_step_post_hook(lambda *_: self._after_step()))
        return model, self._optimizer

    def begin(self, step: int, micro: int, last_micro: bool, lr: float) -> None:
        """Copy the live model to the parameters, once a step."""
        self._step = step
        self._refresh_parameters()

    def after_backward(self, *, update: bool = True) -> StepGradients:
        """Scale gradients to a mean over this rank's samples; the loop then updates."""
        gradients = scale_to_rank_mean_([p for _, p in self._named], self._factor)
        waited_s, self._waited_s = self._waited_s, 0.0
        return StepGradients(gradients, waited_s=waited_s)

    def after_update(self) -> None:
        """Start an average, if this rank is active, once the one before has ended."""
        started_s = time.monotonic()
        with self._recorder.span("wait for peers", "wait", step=self._step):
            self._attached_averager().start_average(self._step)
        self._waited_s += time.monotonic() - started_s
        self._parameters_are_current = False

    def consolidate(self) -> None:
        """Finish all averages and set the model to the mean of all ranks."""
        self._resume()
        self._attached_averager().drain()
        self._shared.copy_to_parameters()
        self._is_averaging = False
        means = self._local_parameters.snapshot()
        all_reduce_mean_(means, self._transport)
        self._local_parameters.swap_in_mean(means)
        self._buffers.consolidate(self._transport)

    def close(self) -> None:
        """Remove the hooks from the model and its optimizer, and end the threads."""
        for hook in self._hooks:
            hook.remove()
        if self._pair_averager is not None:
            self._pair_averager.close()

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """Return this rank's gradients, last layers first."""
        return [(name, p.grad) for name, p in reversed(self._named) if p.grad is not None]

    def local_state(self) -> dict[str, Tensor]:
        """Return this rank's parameters and optimizer state (collective, after `consolidate`)."""
        return self._replica_state()

    def load_local_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `local_state` returned, if not empty (collective, after `consolidate`)."""
        self._local_parameters.restore()
        if select_part(state, "parameters"):
            self._load_replica_state(state)

    def inspect(self) -> SharedParameters:
        """Return the live model, to look at in tests; call it after `attach`."""
        return self._shared

    def _attached_averager(self) -> PairAverager:
        assert self._pair_averager is not None, "attach comes first"
        return self._pair_averager

    def _resume(self) -> None:
        """Copy the parameters to the live model and let peers average with it, unless they do."""
        if not self._is_averaging:
            self._local_parameters.restore()
            self._shared.copy_from_parameters()
            self._attached_averager().open()
            self._is_averaging = True

    def _refresh_parameters(self) -> None:
        """Copy the live model to the parameters, once a step."""
        self._resume()
        if not self._parameters_are_current:
            with self.operation_gate(OperationKind.READ), self._shared.lock:
                self._shared.copy_to_parameters()
            self._parameters_are_current = True

    def _before_forward(self) -> None:
        if torch.is_grad_enabled():
            self._refresh_parameters()

    def _before_step(self) -> None:
        """Lock the live model and copy it to the parameters; `_after_step` unlocks it."""
        self._resume()
        self._update_context.enter_context(self.operation_gate(OperationKind.APPLY))
        self._update_context.enter_context(self._shared.lock)
        self._shared.copy_to_parameters()
        self._parameters_are_current = True  # for a forward in the optimizer's closure

    def _after_step(self) -> None:
        self._shared.copy_from_parameters()
        self._update_context.close()


def _refuse_gpu(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise ConfigError(
                f"strategy.kind = 'adpsgd': parameter {name} is on {parameter.device}. Answering "
                "peers at any time would stall work that is queued on a GPU: leave the model on "
                "the CPU, or take 'crossover' or 'sgp' with strategy.delay = 1"
            )
