"""Gossip: every rank steps by its own gradients, and segments of its model meet those of peers.

::

    backward       a segment has its gradients: update it, let it leave    (segments in one order)
    after_backward those that have not left yet
    forward        (of the next step) a segment arrives before it is used  (delay 0)
    or backward    it arrives once it is updated again, then leaves        (delay 1 and more)

The loop divides its loss by the samples of all ranks; times the number of ranks that is this rank's
own mean, weighed by its samples: the mean of all ranks' steps is the step of the global batch.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.comm.buckets import WIRE
from stretto.comm.channel import Channel, Parcel, Pending
from stretto.comm.post import Post
from stretto.comm.spread import average_, spread_from_rank_0_
from stretto.strategy.alike import had, made_alike
from stretto.strategy.base import Agreed, MakeOptimizer
from stretto.strategy.buffers import Buffers
from stretto.strategy.gossip.config import GossipConfig
from stretto.strategy.gossip.mixer import Differences, Mixer, Pushes
from stretto.strategy.gossip.segments import cut_segments
from stretto.strategy.gossip.turns import Turns
from stretto.strategy.own import Own, optimizer_tensors, put_optimizer_tensors_
from stretto.telemetry.timeline import Recorder
from stretto.topology import Topology


class Gossip:
    """A model on every rank, and rounds of gossip that hold them together."""

    own_models = True

    def __init__(
        self,
        config: GossipConfig,
        channel: Channel,
        recorder: Recorder | None = None,
        *,
        own_means: bool = False,
        calls: Sequence[str] | None = None,
    ) -> None:
        """Make it; ``own_means`` says that the loss is a mean over the rank's own samples."""
        self.reads_gradients = False
        self.sound: Callable[[], bool] = lambda: True
        self._config = config
        self._channel = channel
        self._recorder = recorder or Recorder(channel.rank)
        self._post = Post(channel)
        self._factor = 1.0 if own_means else float(channel.size)
        self._calls = set(calls or ())
        self._hooks: list[RemovableHandle] = []
        self._step = 0
        self._counts = True
        self._waited_s = 0.0

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Give every rank the weights of rank 0, cut segments, hook forward and backward."""
        topology = self._config.who()
        topology.check(self._channel.size)
        spread_from_rank_0_([*model.parameters(), *model.buffers()], self._channel)
        self._buffers = Buffers(model)
        # Backward ends with the first layers: segments leave from the last to the first.
        cut = cut_segments(model, self._config.segments)[::-1]
        self._segments = [[p for _, p in named] for named in cut]
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._own = Own([p for segment in self._segments for p in segment])
        self._channel.reserve(1 + min(self._config.lanes, len(cut)))
        self._mixers = [self._mixer(topology, index) for index in range(len(cut))]
        self._gradients: dict[int, Tensor] = {}
        self._turns = Turns([len(segment) for segment in self._segments], self._act)
        self._hook_backward()
        self._late = self._hook_forward(model)
        self._optimizer = make_optimizer(model.parameters())
        self._hook_steps()
        return model, self._optimizer

    def begin(self, step: int, micro: int, last_micro: bool, lr: float) -> None:
        """Go on with this rank's own model; note whether the coming backward counts."""
        self._own.take_back()
        self._step, self._counts = step, last_micro
        if last_micro:
            self._turns.begin()
            self._gradients.clear()
            if not self.reads_gradients:
                self._hide_gradients()

    def after_backward(self, *, update: bool = True) -> Agreed:
        """Update what backward has not; or leave gradients to whoever reads them first."""
        began_s = time.monotonic()
        waited_s, self._waited_s = self._waited_s, 0.0
        if update and not self.reads_gradients:
            self._turns.finish()
            here_s = time.monotonic() - began_s - self._waited_s
            return Agreed(updated_s=here_s, waited_s=waited_s, done=True)
        for segment in self._segments:
            self._give_gradients(segment)
        grads = [p.grad for segment in self._segments for p in segment if p.grad is not None]
        return Agreed(tuple(grads), waited_s=waited_s)

    def after_update(self) -> None:
        """Let segments leave that have not; let those arrive that no module will wait for."""
        if self.reads_gradients:
            for index in range(len(self._segments)):
                self._speak(index)
        if not self._config.delay:
            for index in self._late:
                self._arrive(index)

    def settle(self) -> None:
        """Make the model the mean of all ranks'; each goes on with its own afterwards."""
        self._own.take_back()
        for index, mixer in enumerate(self._mixers):
            while mixer.under_way and not self._config.delay:
                self._arrive(index)  # now or with the next forward: all the same
            mixer.wait()
        means = [value for mixer in self._mixers for value in mixer.whole()]
        average_(means, self._channel)
        self._own.lay_aside(means)
        self._buffers.settle(self._channel)

    def apart(self) -> float | None:
        """Return how far ranks' own models are from their mean; all ranks together, settled."""
        return self._own.apart(self._channel)

    def unsettle(self) -> None:
        """Go on with this rank's own model."""
        self._own.take_back()

    def close(self) -> None:
        """Take the hooks off the model and end the post's threads."""
        for hook in self._hooks:
            hook.remove()
        self._post.close()

    def whole_optimizer(self) -> Optimizer:
        """Return this rank's optimizer; rank 0's is what others begin with."""
        return self._optimizer

    def take_optimizer(self, whole: Optimizer) -> None:
        """Do nothing: it is the optimizer."""

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """Return this rank's gradients, last layers first."""
        found = ((p, self._gradients.get(id(p), p.grad)) for s in self._segments for p in s)
        return [(self._names[id(p)], grad) for p, grad in found if grad is not None]

    def undoable(self) -> dict[str, Tensor]:
        """Return nothing: of a step that is left out nothing has left."""
        return {}

    def own_state(self) -> dict[str, Tensor]:
        """Return this rank's model, what its optimizer remembers, what is under way; together."""
        names = (self._names[id(p)] for segment in self._segments for p in segment)
        state = {
            f"parameters/{name}": value for name, value in zip(names, self._own.now(), strict=True)
        }
        remembered = made_alike(optimizer_tensors(self._optimizer, self._names), self._channel)
        state |= {f"optimizer/{name}": tensor for name, tensor in remembered.items()}
        for index, mixer in enumerate(self._mixers):
            mixer.wait()
            state |= {f"segment-{index}/{name}": t for name, t in mixer.state().items()}
        return state

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Take it back; nothing: all begin from one model, with nothing under way."""

        def under(place: str) -> dict[str, Tensor]:
            before = f"{place}/"
            return {n.removeprefix(before): t for n, t in state.items() if n.startswith(before)}

        for index, mixer in enumerate(self._mixers):
            mixer.wait()
            mixer.load(under(f"segment-{index}"))
        own = under("parameters")
        if own:
            self._own.take_back()
            names = (self._names[id(p)] for segment in self._segments for p in segment)
            self._own.put_([own[name] for name in names])
            put_optimizer_tensors_(self._optimizer, self._names, had(under("optimizer")))

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: rounds follow from the step."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Accept the empty state."""

    def _mixer(self, topology: Topology, index: int) -> Mixer:
        rank, size = self._channel.rank, self._channel.size
        lane = 1 + index % min(self._config.lanes, len(self._segments))
        number = len(self._segments) - 1 - index  # as the model has them: first layers first

        def carry(sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Pending:
            on_lane = [
                [parcel._replace(lane=lane) for parcel in some] for some in (sends, receives)
            ]
            return self._post.start(on_lane[0], on_lane[1], lane)

        kind = Pushes if self._config.pushes else Differences
        return kind(
            self._segments[index],
            WIRE[self._config.wire],
            lambda step: topology(rank, size, step, number),
            carry,
        )

    def _hook_backward(self) -> None:
        for index, segment in enumerate(self._segments):
            for parameter in segment:
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient(index))
                self._hooks.append(hook)

    def _on_gradient(self, index: int) -> Callable[[Tensor], None]:
        def gradient_is_there(parameter: Tensor) -> None:
            if not self._counts or self.reads_gradients:
                return
            self._hide(parameter)
            self._turns.gradient(index)

        return gradient_is_there

    def _hide_gradients(self) -> None:
        """Put earlier micro-batches' gradients out of sight."""
        for segment in self._segments:
            for parameter in segment:
                if parameter.grad is not None:
                    self._hide(parameter)

    def _hide(self, parameter: Tensor) -> None:
        """Put a gradient out of sight: who steps for one segment must find no other's."""
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        earlier = self._gradients.get(id(parameter))
        self._gradients[id(parameter)] = grad if earlier is None else earlier.add_(grad)

    def _hook_forward(self, model: nn.Module) -> list[int]:
        """Let modules wait for their own segments; return those that none may be relied on for.

        Some parameter of such a segment is of a module that is not known to be called.
        """
        self._hooks.append(model.register_forward_pre_hook(self._goes_on(model)))
        if self._config.delay:
            return []
        of = {id(p): index for index, segment in enumerate(self._segments) for p in segment}
        waited = set[int]()
        for name, module in model.named_modules():
            mine = [p for p in module.parameters(recurse=False) if id(p) in of]
            if mine and name in self._calls:
                needed = sorted({of[id(p)] for p in mine})
                hook = module.register_forward_pre_hook(self._waits_for(module, needed))
                self._hooks.append(hook)
                waited |= {id(p) for p in mine}
        return sorted({index for parameter, index in of.items() if parameter not in waited})

    # Functions, not methods, and for one module each: a copy of the model has the hooks as well.
    def _goes_on(self, model: nn.Module) -> Callable[..., None]:
        mine = weakref.ref(model)

        def before_forward(module: nn.Module, _inputs: object) -> None:
            if module is mine() and torch.is_grad_enabled():
                self._own.take_back()

        return before_forward

    def _waits_for(self, model: nn.Module, needed: Sequence[int]) -> Callable[..., None]:
        mine = weakref.ref(model)

        def before_forward(module: nn.Module, _inputs: object) -> None:
            if module is mine():
                for index in needed:
                    self._arrive(index)

        return before_forward

    def _act(self, index: int) -> None:
        """Update one segment by its gradients, and let it leave."""
        if not self.sound():
            return
        segment = self._segments[index]
        self._give_gradients(segment)
        with self._recorder.span("update", "compute", step=self._step):
            self._optimizer.step()
        for parameter in segment:
            parameter.grad = None
        self._speak(index)

    def _give_gradients(self, segment: Sequence[nn.Parameter]) -> None:
        """Make a segment's gradients those of the rank's own mean."""
        for parameter in segment:
            grad = self._gradients.pop(id(parameter), parameter.grad)
            parameter.grad = None if grad is None else grad.mul_(self._factor)

    def _speak(self, index: int) -> None:
        """Let a segment take part in this step's round, if there is one."""
        if (self._step + 1) % self._config.every:
            return
        mixer = self._mixers[index]
        while mixer.under_way and mixer.under_way >= self._config.delay:
            self._arrive(index)
        mixer.leave(self._step // self._config.every)

    def _arrive(self, index: int) -> None:
        """Let what is under way for a segment count, the oldest first; note how long it took."""
        began_s = time.monotonic()
        if self._mixers[index].under_way:
            with self._recorder.span("wait for peers", "wait", step=self._step):
                self._mixers[index].arrive()
        self._waited_s += time.monotonic() - began_s

    def _hook_steps(self) -> None:
        """See that an update is made on values times mass, whoever asks the optimizer for it."""
        if not self._config.pushes:
            return

        @torch.no_grad()
        def scale(power: int) -> None:
            for segment, mixer in zip(self._segments, self._mixers, strict=True):
                if mixer.mass != 1.0 and any(p.grad is not None for p in segment):
                    torch._foreach_mul_(mixer.values, mixer.mass**power)

        optimizer = self._optimizer
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: scale(1)))
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: scale(-1)))
