"""The sharded strategy: parameters, gradients and optimizer state cut up as a plan says."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.comm.channel import Channel
from stretto.comm.courier import Courier
from stretto.comm.reducer import Summed, Weights
from stretto.comm.small import add_up_
from stretto.comm.spread import spread_from_rank_0_
from stretto.errors import StrettoError
from stretto.plan.building import with_barrier
from stretto.plan.value import Plan
from stretto.strategy.base import Agreed, MakeOptimizer
from stretto.strategy.buffers import Buffers
from stretto.strategy.sample_weights import SampleWeights
from stretto.strategy.sharded.assembly import Assembled, counts_once, cut_up
from stretto.strategy.sharded.assumptions import Owners
from stretto.strategy.sharded.config import ShardedConfig
from stretto.strategy.sharded.drawing import Drawing
from stretto.strategy.sharded.engine import Engine
from stretto.strategy.sharded.heap import let_memory_leave
from stretto.strategy.sharded.hooks import Hooks
from stretto.strategy.sharded.known import Known
from stretto.strategy.sharded.ledger import Ledger
from stretto.strategy.sharded.whole import cut_up_again, put_together
from stretto.telemetry.timeline import Recorder


class Sharded:
    """Gathers parameters before they are used, reduces gradients as they come, as planned."""

    own_models = False
    alone = False

    def __init__(
        self,
        config: ShardedConfig,
        channel: Channel,
        recorder: Recorder | None = None,
        *,
        weigh_samples: bool = False,
    ) -> None:
        self.reads_gradients = False
        self.sound: Callable[[], bool] = lambda: True
        self.inline = False
        """Whether every message is waited for at once: for those who count memory, not time."""
        self.known = Known()
        """Of the model, before `attach`."""
        self._config, self._channel = config, channel
        self._recorder = recorder or Recorder(channel.rank)
        self._courier = Courier(channel, frugal=True)
        self._weigh_samples = weigh_samples
        self._weights: Weights = Summed()
        self._engine: Engine | None = None
        self._whole = True
        self._borrowed: set[int] = set()
        self._step_is_open = False
        self._after_step: Callable[[], None] = lambda: None

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Give every rank the weights of rank 0, cut them up as planned, hook the model."""
        let_memory_leave()
        spread_from_rank_0_([*model.parameters(), *model.buffers()], self._channel)
        if self._weigh_samples:
            self._weights = SampleWeights(model)
        self._buffers = Buffers(model)
        optimizer = make_optimizer(model.parameters())
        known = replace(self.known, barrier=self.reads_gradients)
        self._cut = cut_up(self._config, self._channel, self._courier, model, optimizer, known)
        self._owners = Owners(model, self._cut.model_units)
        self._borrowed = self._freed()
        let_memory_leave()  # that of whole parameters
        self._hooks = Hooks(self._cut.model_units, self)
        for unit, planned in zip(self._cut.model_units, self._cut.plan.units, strict=True):
            if planned.checkpoint:
                self._hooks.recompute(unit)
        model.register_state_dict_pre_hook(self._refuse_if_cut_up)
        model.register_load_state_dict_pre_hook(self._refuse_if_cut_up)
        model.register_load_state_dict_post_hook(lambda *_: self._take_whole())
        return model, optimizer

    @property
    def plan(self) -> Plan:
        """What is done."""
        return self._engine.plan if self._engine is not None else self._cut.plan

    @property
    def ledger(self) -> Ledger:
        """What is kept."""
        return self._cut.ledger

    def _freed(self) -> set[int]:
        units = enumerate(self._cut.plan.units)
        return {index for index, unit in units if unit.sharding.is_freed}

    def _running(self) -> Engine:
        """Return the engine; made when it is known whether somebody reads gradients."""
        if self._engine is None:
            cut: Assembled = self._cut
            plan = with_barrier(cut.plan) if self.reads_gradients else cut.plan
            self._engine = Engine(
                plan, cut.units, cut.carriage, cut.updates, cut.ledger, self._weights
            )
            self._engine.sound = lambda: self.sound()
            on_gpu = cut.units[0].storage.flat.is_cuda
            # There to wait is to queue: no thread is needed for it.
            self._engine.dispatcher.inline = self.inline or on_gpu
            if not on_gpu:
                storages = [held.storage for held in cut.units]
                self._engine.drawing = Drawing(plan, storages, self._recorder)
            if not plan.barrier:
                cut.updates.hide()
        if self._whole:
            self._cut_again()
            self._engine.start()
        return self._engine

    def enter_forward(self, unit: int) -> None:
        """Wait for a unit's parameters, unless all are there."""
        if torch.is_grad_enabled():
            self._close_step()
            self._running().enter_forward(unit)
            self._refuse_moved(unit)
        elif not self._whole:
            raise StrettoError(
                "the model is cut up, and was called without gradients: settle it first "
                "(stretto.settle(model)), on all ranks together"
            )

    def _refuse_moved(self, unit: int) -> None:
        moved = self._cut.units[unit].storage.moved()
        if moved is not None:
            raise StrettoError(
                f"parameter {self._cut.model_units[unit].names[moved]} was given other memory "
                "(.data = ..., or .to(...)) after the model was distributed: write into it (copy_) "
                "between settle and the next step instead"
            )

    def leave_forward(self, unit: int) -> None:
        """Let a unit's parameters go, where they are gathered again for backward."""
        if torch.is_grad_enabled():
            self._running().leave_forward(unit)

    def enter_backward(self, unit: int) -> None:
        """Wait for a unit's parameters."""
        self._running().enter_backward(unit)

    def take_gradient(self, unit: int, tensor: int) -> None:
        """Take a gradient to where it travels from."""
        self._running().take_gradient(unit, tensor)

    def begin(self, step: int, micro: int, last_micro: bool, lr: float) -> None:
        """Note whether the coming backward completes the step's gradients."""
        self._close_step()
        if micro == 0:
            self._owners.check()
        self._weights.begin()
        if last_micro:
            self._weights.start(self._channel)
        engine = self._running()
        if engine.drawing is not None:
            engine.drawing.step = step
        engine.announce(last=last_micro)

    def after_backward(self, *, update: bool = True) -> Agreed:
        """Let what backward left go; where somebody reads gradients, wait for all of them."""
        engine = self._running()
        waited_s = engine.take_waited_s()
        engine.end_backward()
        engine.take_waited_s()  # whoever calls this has a clock of its own
        if not engine.plan.barrier:
            engine.judge(sound=update)
            return Agreed(waited_s=waited_s, done=True)
        self._weights.reset()
        self._step_is_open = True
        if update:
            self._after_step = self._cut.updates.around_whole_step()
        return Agreed(tuple(self._gradients()), waited_s=waited_s, total_norm=self._norm)

    def after_update(self) -> None:
        """Let gathers begin, once all pieces are up to date."""
        self._after_step()
        self._close_step()

    def _close_step(self) -> None:
        """End a step whose update is over, or was left out."""
        self._after_step = lambda: None
        if self._step_is_open:
            self._step_is_open = False
            self._running().release()

    def _gradients(self) -> list[Tensor]:
        pieces = (p.parameter for held in self._cut.units for p in held.storage.pieces)
        return [piece.grad for piece in pieces if piece.grad is not None]

    @torch.no_grad()
    def _norm(self) -> Tensor:
        """Return the norm of all gradients; all ranks together."""
        squares = torch.zeros(1, dtype=torch.float64)
        for held in self._cut.units:
            if counts_once(held.storage, self._channel):
                mine = [
                    p.parameter.grad for p in held.storage.pieces if p.parameter.grad is not None
                ]
                squares += sum(float(n) ** 2 for n in torch._foreach_norm(mine)) if mine else 0.0
        add_up_(squares, self._channel)
        return squares.sqrt()[0]

    def settle(self) -> None:
        """Drain what is in flight, make buffers equal and parameters whole; all ranks together."""
        self._close_step()
        if self._engine is not None and not self._whole:
            self._borrowed = self._engine.make_whole()
            self._whole = True
        self._buffers.settle(self._channel)

    def _cut_again(self) -> None:
        """Let go what was made whole for somebody, and is not needed yet; keep what they wrote."""
        for held in self._cut.units:
            if held.storage.types.kept == held.storage.types.compute:
                held.storage.take_whole()
        for unit in self._borrowed:
            self._cut.units[unit].storage.let_go()
        self._borrowed = set()
        self._whole = False

    def _take_whole(self) -> None:
        for held in self._cut.units:
            held.storage.take_whole()

    def _refuse_if_cut_up(self, *_: object) -> None:
        if not self._whole:
            raise StrettoError(
                "the model is cut up: settle it (stretto.settle(model)) on all ranks together "
                "before its state is read or replaced"
            )

    def close(self) -> None:
        """Take the hooks off the model and end all threads."""
        self._hooks.remove()
        if self._engine is not None:
            self._engine.dispatcher.close()
        self._courier.close()

    def whole_optimizer(self) -> Optimizer:
        """Return an optimizer of whole parameters, complete on rank 0; all ranks together."""
        return put_together(self._cut.updates, self._channel)

    def take_optimizer(self, whole: Optimizer) -> None:
        """Let every rank take its pieces of what ``whole`` remembers."""
        cut_up_again(self._cut.updates, whole)

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """Return this rank's pieces of gradients, last layers first."""
        named: list[tuple[str, Tensor]] = []
        for unit, held in zip(self._cut.model_units, self._cut.units, strict=True):
            for piece in held.storage.pieces:
                if piece.parameter.grad is not None:
                    named.append((unit.names[piece.tensor], piece.parameter.grad))
        return named[::-1]

    def apart(self) -> float | None:
        """Return nothing: there is one model."""
        return None

    def unsettle(self) -> None:
        """Do nothing: what is whole is let go when the next step begins."""

    def undoable(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def own_state(self) -> dict[str, Tensor]:
        """Return nothing: what a rank has of its own is part of the whole."""
        return {}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Accept nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: model and optimizer, both whole, are all there is."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Accept the empty state."""
