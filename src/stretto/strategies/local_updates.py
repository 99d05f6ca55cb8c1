"""Local updates: ranks step alone for some steps, then synchronise (local SGD, DiLoCo and others).

::

    after_backward   gradients are scaled to a mean over this rank's samples
    optimizer.step   by the training loop, on this rank only
    after_update     fragments that are due send their change since the last round
                     fragments that were sent ``delay`` steps ago are synchronised

The step number decides which fragment is due. The loop divides its loss by the samples of all
ranks. Multiplied by the number of ranks, the gradients are means over this rank's samples, weighted
by their number: the mean of all ranks' steps is then the step of the global batch.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.collectives.codecs import WIRE_DTYPES
from stretto.comm.broadcast import all_reduce_mean_, broadcast_
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.transport import Transport
from stretto.errors import CheckpointError, TransportError
from stretto.program.blocks import cut_fragments
from stretto.strategies.contract import MakeOptimizer, StepGradients
from stretto.strategies.local_fragments import (
    AllReduceExchange,
    Fragment,
    FragmentExchange,
    PairExchange,
    new_flat_buffer,
    shift_lanes,
)
from stretto.strategies.local_state import (
    LocalModelStrategy,
    LocalParameters,
    ModelBuffers,
    flatten_state,
    scale_to_rank_mean_,
    select_part,
)
from stretto.strategies.local_updates_config import AveragedConfig, LocalConfig, NoLoCoConfig
from stretto.telemetry.timeline import Recorder


class LocalUpdates(LocalModelStrategy):
    """Trains a model on every rank and synchronises the models in rounds."""

    def __init__(
        self,
        config: LocalConfig,
        transport: Transport,
        recorder: Recorder | None = None,
        *,
        loss_is_rank_mean: bool = False,
    ) -> None:
        """Create it; ``loss_is_rank_mean``: the loss is a mean over this rank's samples."""
        self.reads_gradients = False
        self.is_finite: Callable[[], bool] = lambda: True
        self._config = config
        self._streaming = config.streaming()
        self._transport = transport
        self._recorder = recorder or Recorder(transport.rank)
        self._executor = CollectiveExecutor(transport)
        self._factor = 1.0 if loss_is_rank_mean else float(transport.size)
        self._hooks: list[RemovableHandle] = []
        self._fragments: list[Fragment] = []
        self._step, self._lr = 0, 0.0
        self._waited_s = 0.0

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Broadcast rank 0's weights and cut the model into fragments."""
        broadcast_([*model.parameters(), *model.buffers()], self._transport)
        self._buffers = ModelBuffers(model)
        cut = cut_fragments(model, self._streaming.fragments)
        self._named = [one for _, named in cut for one in named]
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._local_parameters = LocalParameters([p for _, p in self._named])
        parts = [[p for _, p in named] for _, named in cut]
        fragment_turns = [fragment_turn for fragment_turn, _ in cut]
        outer = self._config.outer()
        self._fragments = [
            Fragment(part, fragment_turn, outer, exchange)
            for part, fragment_turn, exchange in zip(
                parts, fragment_turns, self._make_exchanges(parts, fragment_turns), strict=True
            )
        ]
        self._hooks.append(model.register_forward_pre_hook(self._before_forward))
        self._optimizer = make_optimizer(model.parameters())
        return model, self._optimizer

    def begin(self, step: int, micro: int, last_micro: bool, lr: float) -> None:
        """Restore this rank's parameters; record the step and its learning rate."""
        self._local_parameters.restore()
        self._step, self._lr = step, lr

    def after_backward(self, *, update: bool = True) -> StepGradients:
        """Scale gradients to a mean over this rank's samples; the loop then updates."""
        gradients = scale_to_rank_mean_([p for _, p in self._named], self._factor)
        waited_s, self._waited_s = self._waited_s, 0.0
        return StepGradients(gradients, waited_s=waited_s)

    def after_update(self) -> None:
        """Finish the rounds that are due, and send the fragments whose turn it is."""
        started_s = time.monotonic()
        self._finish_due_rounds()
        fragment_turn = self._config.fragment_turn(self._step)
        for fragment in self._fragments:
            if fragment.fragment_turn == fragment_turn:
                fragment.start_round(self._step, self._step // self._config.every)
        self._finish_due_rounds()
        self._waited_s += time.monotonic() - started_s

    def consolidate(self) -> None:
        """Set the model to the mean of all ranks; `restore_local` undoes it."""
        for fragment in self._fragments:
            fragment.wait()
        means = self._local_parameters.snapshot()
        all_reduce_mean_(means, self._transport)
        self._local_parameters.swap_in_mean(means)
        self._buffers.consolidate(self._transport)

    def close(self) -> None:
        """Remove the hook, wait for messages in flight and end the threads."""
        for hook in self._hooks:
            hook.remove()
        with suppress(TransportError):  # the result is not needed any more
            for fragment in self._fragments:
                fragment.wait()
        self._executor.close()

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """Return this rank's gradients, last layers first."""
        return [(name, p.grad) for name, p in reversed(self._named) if p.grad is not None]

    def local_state(self) -> dict[str, Tensor]:
        """Return this rank's parameters, optimizer state and fragments (collective).

        Sums in flight are waited for and included.
        """
        fragments = {f"fragment-{index}": f.state() for index, f in enumerate(self._fragments)}
        return self._replica_state() | flatten_state(fragments)

    def load_local_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `local_state` returned; without fragments in ``state``, begin new rounds.

        Raises:
            CheckpointError: The state belongs to other fragments.
        """
        for fragment in self._fragments:
            fragment.wait()
        self._local_parameters.restore()
        if not self._is_compatible(state):
            for fragment in self._fragments:
                fragment.reset()
            return
        self._load_replica_state(state)
        for index, fragment in enumerate(self._fragments):
            fragment.load(select_part(state, f"fragment-{index}"))

    def _make_exchanges(
        self, parts: Sequence[Sequence[nn.Parameter]], fragment_turns: Sequence[int]
    ) -> list[FragmentExchange]:
        """Return the exchange of each fragment (collective: ranks prepare schedules together)."""
        config, transport = self._config, self._transport
        if isinstance(config, NoLoCoConfig):
            build_topology = config.build_topology()
            return [
                PairExchange(transport, build_topology, new_flat_buffer(part), fragment_turn)
                for part, fragment_turn in zip(parts, fragment_turns, strict=True)
            ]
        assert isinstance(config, AveragedConfig)
        buffers = [new_flat_buffer(part, WIRE_DTYPES[config.wire]) for part in parts]
        table = config.table(transport.mesh, on_gpu=any(buffer.is_cuda for buffer in buffers))
        schedules = [
            shift_lanes(table.pick(buffer.nbytes).schedule(transport.mesh)) for buffer in buffers
        ]
        bound_schedules = self._executor.prepare_all(schedules, buffers)
        return [AllReduceExchange(self._executor, bound) for bound in bound_schedules]

    def _before_forward(self, model: nn.Module, _inputs: object) -> None:
        """Restore this rank's parameters, for loops in which forward comes before `begin`."""
        if model.training and torch.is_grad_enabled():
            self._local_parameters.restore()

    def _finish_due_rounds(self) -> None:
        """Finish the rounds of fragments sent at least ``delay`` steps ago, in a fixed order.

        After skipped steps a fragment may be later than ``delay``; it is finished now.
        """
        delay, mix = self._streaming.delay, self._streaming.mix
        for fragment in self._fragments:
            if fragment.sent_step is not None and self._step - fragment.sent_step >= delay:
                with self._recorder.span("wait for peers", "wait", step=self._step):
                    fragment.wait()
                fragment.finish_round(self._lr, mix)
                if self._config.reset_momentum:
                    self._reset_momentum(fragment.parameters)

    def _reset_momentum(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            buffer = self._optimizer.state.get(parameter, {}).get("momentum_buffer")
            if isinstance(buffer, Tensor):
                buffer.zero_()

    def _is_compatible(self, state: Mapping[str, Tensor]) -> bool:
        """Return whether ``state`` holds fragments; raise if they are other fragments."""
        starts = {n: t.numel() for n, t in state.items() if _is_start_key(n)}
        expected = {f"fragment-{i}/start": f.numel for i, f in enumerate(self._fragments)}
        if starts and starts != expected:
            raise CheckpointError(
                f"the checkpoint keeps where {len(starts)} fragments began, the run has "
                f"{len(expected)}: set strategy.fragments back to resume, or start a new run under "
                "another name (init.checkpoint takes the weights along)"
            )
        return bool(starts)


def _is_start_key(name: str) -> bool:
    return name.startswith("fragment-") and name.endswith("/start")
