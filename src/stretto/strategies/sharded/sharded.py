"""The sharded strategy: parameters, gradients and optimizer state are sharded by a plan."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.comm.broadcast import broadcast_
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.reducer import GradientScaling, NoScaling, SampleCountScaling
from stretto.comm.transport import Transport, all_reduce_small_
from stretto.errors import StrettoError
from stretto.planner.plan import Plan
from stretto.planner.presets import add_barrier
from stretto.strategies.contract import MakeOptimizer, StepGradients
from stretto.strategies.local_state import ModelBuffers
from stretto.strategies.sharded.assembly import (
    ModelInfo,
    ParameterOwners,
    ShardedModel,
    is_counted_here,
    shard_model,
)
from stretto.strategies.sharded.config import ShardedConfig
from stretto.strategies.sharded.engine import Engine
from stretto.strategies.sharded.full_optimizer_state import gather_full_optimizer, shard_optimizer
from stretto.strategies.sharded.module_hooks import ModuleHooks
from stretto.strategies.sharded.scheduler import MessageTimeline
from stretto.strategies.sharded.sharded_unit import MemoryTracker, return_freed_memory
from stretto.telemetry.timeline import Recorder


class Sharded:
    """Unshards parameters before use and reduces gradients as they arrive, as the plan says."""

    replicas_differ = False
    ranks_step_independently = False

    def __init__(
        self,
        config: ShardedConfig,
        transport: Transport,
        recorder: Recorder | None = None,
        *,
        weigh_samples: bool = False,
    ) -> None:
        self.reads_gradients = False
        self.is_finite: Callable[[], bool] = lambda: True
        self.inline = False
        """Whether every message completes before the next starts, to measure memory, not time."""
        self.model_info = ModelInfo()
        """What was measured of the model; to be set before `attach`."""
        self._config, self._transport = config, transport
        self._recorder = recorder or Recorder(transport.rank)
        self._executor = CollectiveExecutor(transport, free_idle_buffers=True)
        self._weigh_samples = weigh_samples
        self._gradient_scaling: GradientScaling = NoScaling()
        self._engine: Engine | None = None
        self._hooks: ModuleHooks | None = None
        self._is_consolidated = True
        self._temporarily_unsharded: set[int] = set()
        self._step_is_open = False
        self._after_step: Callable[[], None] = lambda: None

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Broadcast rank 0's weights, shard them as planned and hook the model."""
        return_freed_memory()
        broadcast_([*model.parameters(), *model.buffers()], self._transport)
        if self._weigh_samples:
            self._gradient_scaling = SampleCountScaling(model)
        self._buffers = ModelBuffers(model)
        optimizer = make_optimizer(model.parameters())
        model_info = replace(self.model_info, barrier=self.reads_gradients)
        self._sharded_model = shard_model(
            self._config, self._transport, self._executor, model, optimizer, model_info
        )
        self._parameter_owners = ParameterOwners(model, self._sharded_model.model_units)
        self._temporarily_unsharded = self._freed_units()
        return_freed_memory()  # the whole parameters were just freed
        self._hooks = hooks = ModuleHooks(self._sharded_model.model_units, self)
        for unit, planned in zip(
            self._sharded_model.model_units, self._sharded_model.plan.units, strict=True
        ):
            if planned.checkpoint:
                hooks.recompute(unit)
        model.register_state_dict_pre_hook(self._raise_if_sharded)
        model.register_load_state_dict_pre_hook(self._raise_if_sharded)
        model.register_load_state_dict_post_hook(lambda *_: self._copy_full_to_master())
        return model, optimizer

    @property
    def plan(self) -> Plan:
        """The plan in use, with the barrier that `reads_gradients` adds once a step has begun."""
        return self._engine.plan if self._engine is not None else self._sharded_model.plan

    @property
    def memory_tracker(self) -> MemoryTracker:
        """Bytes that this rank keeps, by kind."""
        return self._sharded_model.memory_tracker

    def inspect(self) -> ShardedModel:
        """Return the units of the model, to look at in tests; call it after `attach`."""
        return self._sharded_model

    def _freed_units(self) -> set[int]:
        units = enumerate(self._sharded_model.plan.units)
        return {index for index, unit in units if unit.sharding.shards_parameters}

    def _get_engine(self) -> Engine:
        """Return the engine; the first call makes it, because `reads_gradients` is known then."""
        if self._engine is None:
            sharded_model: ShardedModel = self._sharded_model
            plan = add_barrier(sharded_model.plan) if self.reads_gradients else sharded_model.plan
            self._engine = Engine(
                plan,
                sharded_model.units,
                sharded_model.collectives,
                sharded_model.updates,
                sharded_model.memory_tracker,
                self._gradient_scaling,
            )
            self._engine.is_finite = lambda: self.is_finite()
            on_gpu = sharded_model.units[0].sharded.flat.is_cuda
            # On a GPU waiting only queues on a stream, so that no completion thread is needed.
            self._engine.scheduler.inline = self.inline or on_gpu
            if not on_gpu:
                sharded_units = [unit_state.sharded for unit_state in sharded_model.units]
                self._engine.message_timeline = MessageTimeline(plan, sharded_units, self._recorder)
            if not plan.barrier:
                sharded_model.updates.empty_loop_optimizer()
        if self._is_consolidated:
            self._reshard_all()
            self._engine.start()
        return self._engine

    def enter_forward(self, unit: int) -> None:
        """Wait for a unit's parameters; without gradients the model must be consolidated."""
        if torch.is_grad_enabled():
            self._close_step()
            self._get_engine().enter_forward(unit)
            self._raise_if_relocated(unit)
        elif not self._is_consolidated:
            raise StrettoError(
                "the model is sharded, and was called without gradients: consolidate it first "
                "(stretto.consolidate(model)), on all ranks together"
            )

    def _raise_if_relocated(self, unit: int) -> None:
        relocated = self._sharded_model.units[unit].sharded.relocated_parameter()
        if relocated is not None:
            name = self._sharded_model.model_units[unit].names[relocated]
            raise StrettoError(
                f"parameter {name} was given other memory (.data = ..., or .to(...)) after the "
                "model was distributed: write into it (copy_) between consolidate and the next "
                "step instead"
            )

    def leave_forward(self, unit: int) -> None:
        """Reshard a unit after its forward if the plan unshards it again for backward."""
        if torch.is_grad_enabled():
            self._get_engine().leave_forward(unit)

    def enter_backward(self, unit: int) -> None:
        """Wait for a unit's parameters."""
        self._get_engine().enter_backward(unit)

    def on_gradient(self, unit: int, tensor: int) -> None:
        """Copy a gradient into the buffer that it is sent from."""
        self._get_engine().on_gradient(unit, tensor)

    def begin(self, step: int, micro: int, last_micro: bool, lr: float) -> None:
        """Record whether the next backward completes the step's gradients."""
        self._close_step()
        if micro == 0:
            self._parameter_owners.check()
        self._gradient_scaling.begin()
        if last_micro:
            self._gradient_scaling.start(self._transport)
        engine = self._get_engine()
        if engine.message_timeline is not None:
            engine.message_timeline.step = step
        engine.declare_backward(last=last_micro)

    def after_backward(self, *, update: bool = True) -> StepGradients:
        """End the backward; if gradients are read before the update, wait for all of them."""
        engine = self._get_engine()
        waited_s = engine.pop_waited_s()
        engine.end_backward()
        engine.pop_waited_s()  # dropped: the caller times this call itself
        if not engine.plan.barrier:
            engine.set_step_finite(is_finite=update)
            return StepGradients(waited_s=waited_s, is_applied=True)
        self._gradient_scaling.reset()
        self._step_is_open = True
        if update:
            self._after_step = self._sharded_model.updates.before_full_step()
        return StepGradients(tuple(self._gradients()), waited_s=waited_s, total_norm=self._norm)

    def after_update(self) -> None:
        """Start unsharding: all parameter shards are up to date."""
        self._after_step()
        self._close_step()

    def _close_step(self) -> None:
        """End a step whose update is made or skipped."""
        self._after_step = lambda: None
        if self._step_is_open:
            self._step_is_open = False
            self._get_engine().finish_update()

    def _gradients(self) -> list[Tensor]:
        param_slices = (
            p.parameter
            for unit_state in self._sharded_model.units
            for p in unit_state.sharded.param_slices
        )
        return [param_slice.grad for param_slice in param_slices if param_slice.grad is not None]

    @torch.no_grad()
    def _norm(self) -> Tensor:
        """Return the norm of all gradients; all ranks together."""
        squares = torch.zeros(1, dtype=torch.float64)
        for unit_state in self._sharded_model.units:
            if is_counted_here(unit_state.sharded, self._transport):
                own_gradients = [
                    p.parameter.grad
                    for p in unit_state.sharded.param_slices
                    if p.parameter.grad is not None
                ]
                squares += (
                    sum(float(n) ** 2 for n in torch._foreach_norm(own_gradients))
                    if own_gradients
                    else 0.0
                )
        all_reduce_small_(squares, self._transport)
        return squares.sqrt()[0]

    def consolidate(self) -> None:
        """Finish all messages, make buffers equal and parameters whole (collective)."""
        self._close_step()
        if self._engine is not None and not self._is_consolidated:
            self._temporarily_unsharded = self._engine.unshard_all()
            self._is_consolidated = True
        self._buffers.consolidate(self._transport)

    def _reshard_all(self) -> None:
        """Reshard units that only `consolidate` or `attach` made whole, keeping what was written.

        The user may have written into whole parameters meanwhile, so they are copied to the master
        shards first.
        """
        for unit_state in self._sharded_model.units:
            if unit_state.sharded.dtypes.master == unit_state.sharded.dtypes.compute:
                unit_state.sharded.copy_full_to_master()
        for unit in self._temporarily_unsharded:
            self._sharded_model.units[unit].sharded.reshard()
        self._temporarily_unsharded = set()
        self._is_consolidated = False

    def _copy_full_to_master(self) -> None:
        for unit_state in self._sharded_model.units:
            unit_state.sharded.copy_full_to_master()

    def _raise_if_sharded(self, *_: object) -> None:
        if not self._is_consolidated:
            raise StrettoError(
                "the model is sharded: consolidate it (stretto.consolidate(model)) on all ranks "
                "together before its state is read or replaced"
            )

    def close(self) -> None:
        """Remove the hooks from the model and end all threads, also if `attach` has failed."""
        if self._hooks is not None:
            self._hooks.remove()
        if self._engine is not None:
            self._engine.scheduler.close()
        self._executor.close()

    def full_optimizer_state(self) -> Optimizer:
        """Return an optimizer of whole parameters; its state is complete on rank 0 (collective)."""
        return gather_full_optimizer(self._sharded_model.updates, self._transport)

    def load_full_optimizer_state(self, full_optimizer: Optimizer) -> None:
        """Load this rank's shards of the state of ``full_optimizer``."""
        shard_optimizer(self._sharded_model.updates, full_optimizer)

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """Return this rank's gradient shards by parameter name, last layers first."""
        named: list[tuple[str, Tensor]] = []
        for unit, unit_state in zip(
            self._sharded_model.model_units, self._sharded_model.units, strict=True
        ):
            for param_slice in unit_state.sharded.param_slices:
                if param_slice.parameter.grad is not None:
                    named.append((unit.names[param_slice.tensor], param_slice.parameter.grad))
        return named[::-1]

    def consensus_distance(self) -> float | None:
        """Return None: all ranks have the same model."""
        return None

    def restore_local(self) -> None:
        """Do nothing: the next step reshards what `consolidate` made whole."""

    def rollback_state(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def local_state(self) -> dict[str, Tensor]:
        """Return nothing: each rank's shards are part of the full model and optimizer."""
        return {}

    def load_local_state(self, state: Mapping[str, Tensor]) -> None:
        """Accept nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a run resumes from the full model and optimizer."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Accept the empty state."""
