"""Gossip: every group steps by its own gradients, and segments of its model meet those of peers.

::

    backward       a segment has its gradients: sum them inside the group  (segments in one order)
                   the sum is there: update it, let it leave
    after_backward those that have not left yet
    forward        (of the next step) a segment arrives before it is used  (delay 0)
    or backward    it arrives once it is updated again, then leaves        (delay 1 and more)
    after_update   now and then all meet instead                           (`together`)

A group is a rank, unless some are put together. Where gradients are mixed, instead of parameters,
they leave in backward once they are summed, and arrive in after_backward; then the loop updates.

The loop divides its loss by the samples of all ranks; a group's sum times the number of groups is
its own mean, weighed by its samples: the mean of all groups' steps is the step of the global batch.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.comm.buckets import WIRE
from stretto.comm.channel import Channel, Pending
from stretto.comm.courier import Courier
from stretto.comm.errand import Scratch
from stretto.comm.post import Post
from stretto.comm.spread import average_, spread_from_rank_0_
from stretto.strategy.base import Agreed, MakeOptimizer
from stretto.strategy.buffers import Buffers
from stretto.strategy.gossip.coded import differences
from stretto.strategy.gossip.config import GossipConfig
from stretto.strategy.gossip.gradient_mixer import GradientMixer
from stretto.strategy.gossip.gradients import gradients_of
from stretto.strategy.gossip.group import group_of
from stretto.strategy.gossip.mixer import Mixer, Pushes
from stretto.strategy.gossip.route import Route
from stretto.strategy.gossip.segments import cut_segments
from stretto.strategy.gossip.together import Together
from stretto.strategy.gossip.turns import Turns
from stretto.strategy.own import Own, OwnModels, laid_out, under
from stretto.telemetry.timeline import Recorder
from stretto.topology import Peers, Topology

_GROUPS = "groups"
"""Under which name a checkpoint keeps how many there were."""


class Gossip(OwnModels):
    """A model in every group, and rounds of gossip that hold them together."""

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
        self._post, self._courier = Post(channel), Courier(channel)
        self._scratch = Scratch()
        self._ends = ExitStack()
        self._ends.callback(self._post.close)
        self._ends.callback(self._courier.close)
        self._own_means = own_means
        self._calls = set(calls or ())
        self._hooks: list[RemovableHandle] = []
        self._step = 0
        self._counts = self._updates = True
        self._waited_s = 0.0

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Give every rank the weights of rank 0, cut segments, hook forward and backward."""
        between = self._config.who()
        group = group_of(self._channel.rank, self._channel.mesh, self._config.groups, between)
        spread_from_rank_0_([*model.parameters(), *model.buffers()], self._channel)
        self._buffers = Buffers(model)
        # Backward ends with the first layers: segments leave from the last to the first.
        cut = cut_segments(model, self._config.segments)[::-1]
        self._segments = [[p for _, p in named] for named in cut]
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._own = Own([p for segment in self._segments for p in segment])
        lanes = min(self._config.lanes, len(cut))
        self._channel.reserve(1 + lanes)
        routes = [
            Route(group, self._channel, self._post, 1 + index % lanes) for index in range(len(cut))
        ]
        self._mixers = [self._mixer(between, route, index) for index, route in enumerate(routes)]
        factor = 1.0 / group.width if self._own_means else float(group.count)
        self._gradients = gradients_of(self._segments, factor, group, self._courier, 1 + lanes)
        self._group = group
        # Who steps by what others say, or shares a model with them, must judge steps with them.
        self.alone = self.alone and group.width == 1 and not self._config.mixes_gradients
        self._together = Together(self._config, self._mixers, self._channel, self._courier)
        self._ends.callback(self._together.close)
        act = self._tell_gradients if self._config.mixes_gradients else self._act
        self._turns = Turns([len(segment) for segment in self._segments], self._sum, act)
        self._hook_backward()
        self._late = self._hook_forward(model)
        self._optimizer = make_optimizer(model.parameters())
        self._hook_steps()
        return model, self._optimizer

    def begin(self, step: int, micro: int, last_micro: bool, lr: float) -> None:
        """Go on with this rank's own model; note whether the coming backward counts."""
        self._own.take_back()
        self._step, self._counts = step, last_micro
        self._updates = True
        self._together.begin(step)
        if last_micro:
            self._turns.begin()
            for gradients in self._gradients:
                gradients.begin()
                if not self.reads_gradients:
                    gradients.hide_all()

    def after_backward(self, *, update: bool = True) -> Agreed:
        """Update what backward has not; or leave gradients to whoever reads them first."""
        began_s = time.monotonic()
        waited_s, self._waited_s = self._waited_s, 0.0
        self._updates = update
        self._turns.start_rest()
        mixes = self._config.mixes_gradients
        done = update and not mixes and not self.reads_gradients
        if mixes:
            self._hear_gradients()
        elif done:
            self._turns.act_rest()
        else:
            for index in range(len(self._segments)):
                if self.reads_gradients:
                    self._look(index)
                self._give(index)
        # What was waited for in here is seen by whoever times this call.
        here_s, self._waited_s = time.monotonic() - began_s - self._waited_s, 0.0
        apart = self._together.apart
        if done:
            return Agreed(updated_s=here_s, waited_s=waited_s, done=True, apart=apart)
        grads = [p.grad for segment in self._segments for p in segment if p.grad is not None]
        return Agreed(tuple(grads), waited_s=waited_s, apart=apart)

    def after_update(self) -> None:
        """Let segments leave that have not; let those arrive that no module will wait for.

        Peers count on a rank whose step was left out: it tells them what it has. Where the step is
        to end with an exact average, all meet instead.
        """
        if not self._acts_in_backward:
            for index in range(len(self._segments)):
                self._speak(index)
        else:
            self._turns.act_rest()
        if not self._config.delay:
            for index in self._late:
                self._arrive(index)
        self._together.tell()
        if self._together.due:
            with self._waiting("exact average"):
                self._together.meet()

    def settle(self) -> None:
        """Make the model the mean of all groups'; each goes on with its own afterwards."""
        self._own.take_back()
        for index, mixer in enumerate(self._mixers):
            while mixer.under_way and not self._config.delay:
                self._arrive(index)  # now or with the next forward: all the same
            mixer.wait()
        means = [value for mixer in self._mixers for value in mixer.whole()]
        average_(means, self._channel)
        self._own.lay_aside(means)
        self._buffers.settle(self._channel)

    def close(self) -> None:
        """Take the hooks off the model and end what is under way and its threads."""
        for hook in self._hooks:
            hook.remove()
        self._ends.close()

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """Return this rank's gradients, last layers first; its group's, where these were summed."""
        found = (pair for gradients in self._gradients for pair in gradients.found())
        return [(self._names[id(parameter)], grad) for parameter, grad in found]

    def own_state(self) -> dict[str, Tensor]:
        """Return this rank's model, what its optimizer remembers, what is under way; together."""
        for mixer in self._mixers:
            mixer.wait()
        parts = {f"segment-{index}": m.state() for index, m in enumerate(self._mixers)}
        parts["together"] = self._together.state()
        return self._kept() | laid_out(parts) | {_GROUPS: torch.tensor(self._group.count)}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Take it back; nothing, or that of other groups: all begin from one model.

        Raises:
            CheckpointError: What is under way is of other segments, or of another way to mix.
        """
        if int(state.get(_GROUPS, self._channel.size)) != self._group.count:
            state = {}
        for index, mixer in enumerate(self._mixers):
            mixer.wait()
            mixer.load(under(state, f"segment-{index}"))
        self._together.load(under(state, "together"))
        if under(state, "parameters"):
            self._take_kept(state)

    @property
    def _acts_in_backward(self) -> bool:
        """Whether a segment acts once it has its gradients, and not only when all have theirs."""
        return self._config.mixes_gradients or not self.reads_gradients

    def _mixer(self, between: Topology, route: Route, index: int) -> Mixer:
        number = len(self._segments) - 1 - index  # as the model has them: first layers first

        def whom(step: int) -> Peers:
            return route.group.peers(between, step, number)

        segment, wire = self._segments[index], self._config.wire
        if self._config.pushes:
            return Pushes(segment, None, whom, route)
        if self._config.mixes_gradients:
            return GradientMixer(segment, WIRE[wire], whom, route)
        return differences(wire, segment, whom, route, self._scratch)

    def _hook_backward(self) -> None:
        for index, segment in enumerate(self._segments):
            for parameter in segment:
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient(index))
                self._hooks.append(hook)

    def _on_gradient(self, index: int) -> Callable[[Tensor], None]:
        def gradient_is_there(parameter: Tensor) -> None:
            if not self._counts:
                return
            if not self.reads_gradients:
                self._gradients[index].hide(parameter)
            self._turns.gradient(index)
            if self._acts_in_backward:
                self._turns.act()

        return gradient_is_there

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

    def _sum(self, index: int) -> Pending:
        """Begin to sum a segment's gradients inside the group."""
        return self._gradients[index].start()

    def _act(self, index: int) -> None:
        """Update one segment by its gradients, unless the step is left out; let it leave.

        Of a step that all leave out, nobody's leaves.
        """
        self._look(index)
        updates = self._updates and self.sound()
        if updates:
            self._update(index)
        if updates or self.alone:
            self._speak(index)

    def _update(self, index: int) -> None:
        self._give(index)
        self._stepping = self._segments[index]
        with self._recorder.span("update", "compute", step=self._step):
            self._optimizer.step()
        self._stepping = None
        for parameter in self._segments[index]:
            parameter.grad = None

    def _tell_gradients(self, index: int) -> None:
        """Let a segment's gradients leave; they stay where they are, to be moved by others'."""
        self._look(index)
        self._give(index)
        if self.sound():
            self._speak(index)

    def _hear_gradients(self) -> None:
        """Let the rest leave and all arrive; the ranks agree on whether any has left."""
        self._turns.act_rest()
        for index in range(len(self._segments)):
            self._arrive(index)

    def _look(self, index: int) -> None:
        """Let a segment be measured as forward saw it, before its update."""
        if self._together.looks and not self._config.delay:
            self._arrive(index)  # where no forward has waited for it
        self._together.see(index)

    def _give(self, index: int) -> None:
        """Make a segment's gradients those of the group's mean, once they are summed."""
        pending = self._turns.started[index]
        if pending.finished_s is None:
            with self._waiting("wait for gradients"):
                pending.wait()
        self._gradients[index].give()

    def _speak(self, index: int) -> None:
        """Let a segment take part in this step's round, if there is one.

        An average of models takes the place of a round of models, not of one of gradients.
        """
        replaced = self._together.due and not self._config.mixes_gradients
        if replaced or (self._step + 1) % self._config.every:
            return
        mixer = self._mixers[index]
        while mixer.under_way and mixer.under_way >= self._config.delay:
            self._arrive(index)
        mixer.leave(self._step // self._config.every)

    def _arrive(self, index: int) -> None:
        """Let what is under way for a segment count, the oldest first."""
        if self._mixers[index].under_way:
            with self._waiting("wait for peers"):
                self._mixers[index].arrive()

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Note how long something was waited for."""
        began_s = time.monotonic()
        with self._recorder.span(what, "wait", step=self._step):
            yield
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
