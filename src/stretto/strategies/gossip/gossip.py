"""The gossip strategy: groups step with their own gradients and mix segments with peer groups.

::

    backward        once a segment has its gradients: sum them in the group (segments in order)
                    once the sum is done: update the segment, send it to peers
    after_backward  update and send the remaining segments
    forward         (of the next step) receive a segment before it is used  (delay 0)
    or backward     receive it after its next update, then send it again    (delay 1 and more)
    after_update    now and then an exact average of all ranks instead      (`consensus`)

By default every rank is a group. With ``mix = "gradients"`` gradients are sent in backward once
they are summed, and received in after_backward; then the loop updates.

The loop divides its loss by the samples of all ranks. A group's sum times the number of groups is
the mean over its own samples, weighted by their number: the mean of all groups' steps is then the
step of the global batch.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.collectives.codecs import WIRE_DTYPES
from stretto.comm.bound_schedule import BufferPool
from stretto.comm.broadcast import all_reduce_mean_, broadcast_
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.p2p_executor import P2PExecutor
from stretto.comm.transport import Transport
from stretto.program.blocks import cut_segments
from stretto.strategies.contract import MakeOptimizer, StepGradients
from stretto.strategies.gossip.coded_wire import make_difference_mixer
from stretto.strategies.gossip.config import GossipConfig
from stretto.strategies.gossip.consensus import ConsensusController
from stretto.strategies.gossip.gradients import GradientMixer, make_segment_gradients
from stretto.strategies.gossip.groups import GossipRoute, RankGroup, group_of
from stretto.strategies.gossip.mixer import PushSumMixer, SegmentMixer, hook_mass
from stretto.strategies.gossip.segments import SegmentQueue
from stretto.strategies.local_state import (
    LocalModelStrategy,
    LocalParameters,
    ModelBuffers,
    flatten_state,
    pre_hook_of,
    select_part,
)
from stretto.telemetry.timeline import Recorder
from stretto.topology import RoundPeers, Topology

_GROUP_COUNT_KEY = "groups"
"""Checkpoint key of the number of groups."""


class GossipParts(NamedTuple):
    """The parts of a `Gossip` strategy: what `Gossip.inspect` returns."""

    group: RankGroup
    mixers: Sequence[SegmentMixer]
    """The mixers of the segments, from the last layers to the first."""
    consensus: ConsensusController
    segment_queue: SegmentQueue


class Gossip(LocalModelStrategy):
    """Trains a model in every group and mixes the models in rounds of gossip."""

    def __init__(
        self,
        config: GossipConfig,
        transport: Transport,
        recorder: Recorder | None = None,
        *,
        loss_is_rank_mean: bool = False,
        calls: Sequence[str] | None = None,
    ) -> None:
        """Create it; ``loss_is_rank_mean``: the loss is a mean over this rank's samples."""
        self.reads_gradients = False
        self.is_finite: Callable[[], bool] = lambda: True
        self._config = config
        self._transport = transport
        self._recorder = recorder or Recorder(transport.rank)
        self._p2p_executor, self._executor = P2PExecutor(transport), CollectiveExecutor(transport)
        self._buffer_pool = BufferPool()
        self._cleanup = ExitStack()
        self._cleanup.callback(self._p2p_executor.close)
        self._cleanup.callback(self._executor.close)
        self._loss_is_rank_mean = loss_is_rank_mean
        self._calls = set(calls or ())
        self._hooks: list[RemovableHandle] = []
        self._step = 0
        self._ends_step = self._may_update = True
        self._waited_s = 0.0

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Broadcast rank 0's weights, cut segments, hook forward and backward."""
        topology = self._config.build_topology()
        group = group_of(self._transport.rank, self._transport.mesh, self._config.groups, topology)
        broadcast_([*model.parameters(), *model.buffers()], self._transport)
        self._buffers = ModelBuffers(model)
        # Backward ends with the first layers, so segments are sent from the last to the first.
        cut = cut_segments(model, self._config.segments)[::-1]
        self._segments = [[p for _, p in named] for named in cut]
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._local_parameters = LocalParameters([p for segment in self._segments for p in segment])
        lanes = min(self._config.lanes, len(cut))
        self._transport.reserve(1 + lanes)
        routes = [
            GossipRoute(group, self._transport, self._p2p_executor, 1 + index % lanes)
            for index in range(len(cut))
        ]
        self._mixers = [self._mixer(topology, route, index) for index, route in enumerate(routes)]
        factor = 1.0 / group.width if self._loss_is_rank_mean else float(group.count)
        self._gradients = make_segment_gradients(
            self._segments, factor, group, self._executor, 1 + lanes
        )
        self._group = group
        # Ranks that mix gradients or share a model must skip a step together.
        self.ranks_step_independently = (
            self.ranks_step_independently and group.width == 1 and not self._config.mixes_gradients
        )
        self._consensus = ConsensusController(
            self._config, self._mixers, self._transport, self._executor
        )
        self._cleanup.callback(self._consensus.close)
        mixes_gradients = self._config.mixes_gradients
        self._segment_queue = SegmentQueue(
            [len(segment) for segment in self._segments],
            sum_in_group=lambda index: self._gradients[index].start(),
            update_and_send=self._send_gradients if mixes_gradients else self._update_and_send,
        )
        self._hook_backward()
        self._segments_without_hook = self._hook_forward(model)
        self._optimizer = make_optimizer(model.parameters())
        if self._config.is_push_sum:
            self._hooks += hook_mass(self._optimizer, self._segments, self._mixers)
        return model, self._optimizer

    def begin(self, step: int, micro: int, last_micro: bool, lr: float) -> None:
        """Restore this rank's parameters; record whether the next backward ends the step."""
        self._local_parameters.restore()
        self._step, self._ends_step = step, last_micro
        self._may_update = True
        self._consensus.begin(step)
        if last_micro:
            self._segment_queue.begin()
            for gradients in self._gradients:
                gradients.begin()
                if not self.reads_gradients:
                    gradients.stash_all()

    def after_backward(self, *, update: bool = True) -> StepGradients:
        """Update the segments that backward has not updated, unless the loop reads gradients."""
        started_s = time.monotonic()
        waited_s, self._waited_s = self._waited_s, 0.0
        self._may_update = update
        self._segment_queue.start_rest()
        mixes_gradients = self._config.mixes_gradients
        is_applied = update and not mixes_gradients and not self.reads_gradients
        if mixes_gradients:
            self._receive_gradients()
        elif is_applied:
            self._segment_queue.process_rest()
        else:
            for index in range(len(self._segments)):
                if self.reads_gradients:
                    self._measure(index)
                self._install_gradients(index)
        # Waits in this call are not reported: the caller times the call itself.
        processing_s, self._waited_s = time.monotonic() - started_s - self._waited_s, 0.0
        consensus_distance = self._consensus.consensus_distance
        if is_applied:
            return StepGradients(
                updated_s=processing_s,
                waited_s=waited_s,
                is_applied=True,
                consensus_distance=consensus_distance,
            )
        grads = [p.grad for segment in self._segments for p in segment if p.grad is not None]
        return StepGradients(tuple(grads), waited_s=waited_s, consensus_distance=consensus_distance)

    def after_update(self) -> None:
        """Send the remaining segments; receive those that no forward hook waits for.

        A rank that skipped its step sends, too, because its peers wait for it. An exact average
        replaces the round of gossip if the step ends with one.
        """
        if not self._processes_in_backward:
            for index in range(len(self._segments)):
                self._start_round(index)
        else:
            self._segment_queue.process_rest()
        if not self._config.delay:
            self._finish_rounds(self._segments_without_hook)
        self._consensus.start_measurement()
        if self._consensus.due:
            with self._timed_wait("exact average"):
                self._consensus.average_exactly()

    def consolidate(self) -> None:
        """Set the model to the mean of all groups; `restore_local` undoes it."""
        self._local_parameters.restore()
        for index, mixer in enumerate(self._mixers):
            while mixer.rounds_in_flight and not self._config.delay:
                self._finish_round(index)  # the next forward would do the same
            mixer.wait()
        means = [value for mixer in self._mixers for value in mixer.values_to_average()]
        all_reduce_mean_(means, self._transport)
        self._local_parameters.swap_in_mean(means)
        self._buffers.consolidate(self._transport)

    def close(self) -> None:
        """Remove the hooks from the model, end messages in flight and threads."""
        for hook in self._hooks:
            hook.remove()
        self._cleanup.close()

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """Return this rank's gradients, or its group's if summed already, last layers first."""
        available = (pair for gradients in self._gradients for pair in gradients.available())
        return [(self._names[id(parameter)], grad) for parameter, grad in available]

    def local_state(self) -> dict[str, Tensor]:
        """Return parameters, optimizer state and received changes of this rank (collective)."""
        for mixer in self._mixers:
            mixer.wait()
        parts = {f"segment-{index}": m.state() for index, m in enumerate(self._mixers)}
        parts["together"] = self._consensus.state()
        return (
            self._replica_state()
            | flatten_state(parts)
            | {_GROUP_COUNT_KEY: torch.tensor(self._group.count)}
        )

    def load_local_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `local_state` returned, unless it is of another number of groups.

        Raises:
            CheckpointError: The state is of other segments or another kind of gossip.
        """
        if int(state.get(_GROUP_COUNT_KEY, self._transport.size)) != self._group.count:
            state = {}
        for index, mixer in enumerate(self._mixers):
            mixer.wait()
            mixer.load(select_part(state, f"segment-{index}"))
        self._consensus.load(select_part(state, "together"))
        if select_part(state, "parameters"):
            self._load_replica_state(state)

    def inspect(self) -> GossipParts:
        """Return the parts of this strategy, to look at in tests; call it after `attach`."""
        return GossipParts(self._group, self._mixers, self._consensus, self._segment_queue)

    @property
    def _processes_in_backward(self) -> bool:
        """Whether segments are processed during backward, as soon as they have their gradients."""
        return self._config.mixes_gradients or not self.reads_gradients

    def _mixer(self, topology: Topology, route: GossipRoute, index: int) -> SegmentMixer:
        number = len(self._segments) - 1 - index  # topologies count from the first layers

        def peers_of(step: int) -> RoundPeers:
            return route.group.peers(topology, step, number)

        segment, wire = self._segments[index], self._config.wire
        if self._config.is_push_sum:
            return PushSumMixer(segment, None, peers_of, route)
        if self._config.mixes_gradients:
            return GradientMixer(segment, WIRE_DTYPES[wire], peers_of, route)
        return make_difference_mixer(wire, segment, peers_of, route, self._buffer_pool)

    def _hook_backward(self) -> None:
        for index, segment in enumerate(self._segments):
            for parameter in segment:
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient(index))
                self._hooks.append(hook)

    def _on_gradient(self, index: int) -> Callable[[Tensor], None]:
        def on_gradient_ready(parameter: Tensor) -> None:
            if not self._ends_step:
                return
            if not self.reads_gradients:
                self._gradients[index].stash(parameter)
            self._segment_queue.on_gradient(index)
            if self._processes_in_backward:
                self._segment_queue.process()

        return on_gradient_ready

    def _hook_forward(self, model: nn.Module) -> list[int]:
        """Make modules wait for their segments; return the segments without a reliable wait.

        Such a segment has a parameter whose module is not known to be called.
        """
        self._hooks.append(
            model.register_forward_pre_hook(pre_hook_of(model, self._before_forward))
        )
        if self._config.delay:
            return []
        segment_of = {id(p): index for index, segment in enumerate(self._segments) for p in segment}
        hooked_parameters = set[int]()
        for name, module in model.named_modules():
            hooked = {id(p) for p in module.parameters(recurse=False)} & segment_of.keys()
            if hooked and name in self._calls:
                wait = partial(self._finish_rounds, sorted({segment_of[p] for p in hooked}))
                self._hooks.append(module.register_forward_pre_hook(pre_hook_of(module, wait)))
                hooked_parameters |= hooked
        return sorted({index for p, index in segment_of.items() if p not in hooked_parameters})

    def _before_forward(self) -> None:
        if torch.is_grad_enabled():
            self._local_parameters.restore()

    def _update_and_send(self, index: int) -> None:
        """Update one segment, unless the step is skipped, and send it.

        If all ranks skip the step, no rank sends.
        """
        self._measure(index)
        updates = self._may_update and self.is_finite()
        if updates:
            self._update(index)
        if updates or self.ranks_step_independently:
            self._start_round(index)

    def _update(self, index: int) -> None:
        self._install_gradients(index)
        self._parameters_to_step = self._segments[index]
        with self._recorder.span("update", "compute", step=self._step):
            self._optimizer.step()
        self._parameters_to_step = None
        for parameter in self._segments[index]:
            parameter.grad = None

    def _send_gradients(self, index: int) -> None:
        """Send a segment's gradients; the received ones will be averaged into them."""
        self._measure(index)
        self._install_gradients(index)
        if self.is_finite():
            self._start_round(index)

    def _receive_gradients(self) -> None:
        """Send the remaining gradients and receive all; ranks agree on whether any were sent."""
        self._segment_queue.process_rest()
        self._finish_rounds(range(len(self._segments)))

    def _measure(self, index: int) -> None:
        """Sample a segment for the consensus distance as forward used it, before its update."""
        if self._consensus.is_measuring and not self._config.delay:
            self._finish_round(index)  # forward may not have waited for it
        self._consensus.sample_segment(index)

    def _install_gradients(self, index: int) -> None:
        """Wait for the group's sum of a segment's gradients and set the parameters' gradients."""
        work = self._segment_queue.started[index]
        if work.finished_s is None:
            with self._timed_wait("wait for gradients"):
                work.wait()
        self._gradients[index].install()

    def _start_round(self, index: int) -> None:
        """Send a segment in this step's round, if there is one, after what ``delay`` makes due.

        With a delay, earlier rounds of the segment are received and applied first, so that at most
        ``delay`` of them travel. An exact average replaces a round that mixes parameters, but not
        one that mixes gradients.
        """
        replaced = self._consensus.due and not self._config.mixes_gradients
        if replaced or (self._step + 1) % self._config.every:
            return
        mixer = self._mixers[index]
        while mixer.rounds_in_flight and mixer.rounds_in_flight >= self._config.delay:
            self._finish_round(index)
        mixer.start_round(self._step // self._config.every)

    def _finish_round(self, index: int) -> None:
        """Receive and apply the oldest round in flight of a segment, if there is one."""
        if self._mixers[index].rounds_in_flight:
            with self._timed_wait("wait for peers"):
                self._mixers[index].finish_round()

    def _finish_rounds(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._finish_round(index)

    @contextmanager
    def _timed_wait(self, name: str) -> Iterator[None]:
        """Record the body as a wait of ``name``."""
        started_s = time.monotonic()
        with self._recorder.span(name, "wait", step=self._step):
            yield
        self._waited_s += time.monotonic() - started_s
