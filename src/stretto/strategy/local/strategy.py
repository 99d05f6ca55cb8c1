"""Local updates: every rank steps by itself for a while, then begins again with its peers.

::

    after_backward   gradients become those of this rank's own mean
    optimizer.step   the loop's own, on this rank alone
    after_update     a fragment whose turn it is leaves: how far its steps have led it
                     one that left ``delay`` steps ago arrives: all begin again from one point

Whose turn it is follows from the step. The loop divides its loss by the samples of all ranks; times
the number of ranks that is this rank's own mean, weighed by its samples: the mean of all ranks'
steps is the step of the global batch.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.comm.buckets import WIRE
from stretto.comm.channel import Channel
from stretto.comm.courier import Courier
from stretto.comm.spread import average_, spread_from_rank_0_
from stretto.errors import ChannelError, CheckpointError
from stretto.strategy.base import Agreed, MakeOptimizer
from stretto.strategy.buffers import Buffers
from stretto.strategy.local.config import AveragedConfig, LocalConfig, NoLoCoConfig
from stretto.strategy.local.fragment import Fragment, cut_fragments
from stretto.strategy.local.travel import Everybody, Pair, Travel, beside, room_for
from stretto.strategy.own import Own, OwnModels, laid_out, own_means_, under
from stretto.telemetry.timeline import Recorder


class LocalUpdates(OwnModels):
    """A model on every rank, and rounds in which they begin again together."""

    def __init__(
        self,
        config: LocalConfig,
        channel: Channel,
        recorder: Recorder | None = None,
        *,
        own_means: bool = False,
    ) -> None:
        """Make it; ``own_means`` says that the loss is a mean over the rank's own samples."""
        self.reads_gradients = False
        self.sound: Callable[[], bool] = lambda: True
        self._config = config
        self._streaming = config.streaming()
        self._channel = channel
        self._recorder = recorder or Recorder(channel.rank)
        self._courier = Courier(channel)
        self._factor = 1.0 if own_means else float(channel.size)
        self._hooks: list[RemovableHandle] = []
        self._fragments: list[Fragment] = []
        self._step, self._lr = 0, 0.0
        self._waited_s = 0.0

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Give every rank the weights of rank 0, and cut fragments."""
        spread_from_rank_0_([*model.parameters(), *model.buffers()], self._channel)
        self._buffers = Buffers(model)
        cut = cut_fragments(model, self._streaming.fragments)
        self._named = [one for _, named in cut for one in named]
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._own = Own([p for _, p in self._named])
        parts = [[p for _, p in named] for _, named in cut]
        turns = [turn for turn, _ in cut]
        outer = self._config.outer()
        self._fragments = [
            Fragment(part, turn, outer, travel)
            for part, turn, travel in zip(parts, turns, self._travels(parts, turns), strict=True)
        ]
        self._hooks.append(model.register_forward_pre_hook(self._before_forward))
        self._optimizer = make_optimizer(model.parameters())
        return model, self._optimizer

    def begin(self, step: int, micro: int, last_micro: bool, lr: float) -> None:
        """Go on with this rank's own model; note the step and its rate."""
        self._own.take_back()
        self._step, self._lr = step, lr

    def after_backward(self, *, update: bool = True) -> Agreed:
        """Make gradients those of this rank's own mean; the loop updates by them."""
        gradients = own_means_([p for _, p in self._named], self._factor)
        waited_s, self._waited_s = self._waited_s, 0.0
        return Agreed(gradients, waited_s=waited_s)

    def after_update(self) -> None:
        """Let those arrive that were to be here by now, and those leave whose turn it is."""
        began_s = time.monotonic()
        self._arrive()
        turn = self._config.turn(self._step)
        for fragment in self._fragments:
            if fragment.turn == turn:
                fragment.leave(self._step, self._step // self._config.every)
        self._arrive()
        self._waited_s += time.monotonic() - began_s

    def settle(self) -> None:
        """Make the model the mean of all ranks'; each goes on with its own afterwards."""
        for fragment in self._fragments:
            fragment.wait()
        means = self._own.now()
        average_(means, self._channel)
        self._own.lay_aside(means)
        self._buffers.settle(self._channel)

    def close(self) -> None:
        """Take the hook off the model, and end what is under way and its threads."""
        for hook in self._hooks:
            hook.remove()
        with suppress(ChannelError):  # nobody needs it any more
            for fragment in self._fragments:
                fragment.wait()
        self._courier.close()

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """Return this rank's gradients, last layers first."""
        return [(name, p.grad) for name, p in reversed(self._named) if p.grad is not None]

    def own_state(self) -> dict[str, Tensor]:
        """Return this rank's model, what its optimizer remembers, where rounds began; all together.

        Sums that are under way are waited for, and are in it.
        """
        fragments = {f"fragment-{index}": f.state() for index, f in enumerate(self._fragments)}
        return self._kept() | laid_out(fragments)

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Take it back; nothing: all begin from one model, with nothing under way.

        Raises:
            CheckpointError: It was kept for other fragments.
        """
        for fragment in self._fragments:
            fragment.wait()
        self._own.take_back()
        if not self._fits(state):
            for fragment in self._fragments:
                fragment.begin_anew()
            return
        self._take_kept(state)
        for index, fragment in enumerate(self._fragments):
            fragment.load(under(state, f"fragment-{index}"))

    def _travels(
        self, parts: Sequence[Sequence[nn.Parameter]], turns: Sequence[int]
    ) -> list[Travel]:
        """Return how each fragment reaches its peers; all ranks agree on every message here."""
        config, channel = self._config, self._channel
        if isinstance(config, NoLoCoConfig):
            who = config.who()
            return [
                Pair(channel, who, room_for(part), turn)
                for part, turn in zip(parts, turns, strict=True)
            ]
        assert isinstance(config, AveragedConfig)
        rooms = [room_for(part, WIRE[config.wire]) for part in parts]
        table = config.table(channel.mesh, on_gpu=any(room.is_cuda for room in rooms))
        schedules = [beside(table.pick(room.nbytes).schedule(channel.mesh)) for room in rooms]
        errands = self._courier.prepare_all(schedules, rooms)
        return [Everybody(self._courier, errand) for errand in errands]

    def _before_forward(self, model: nn.Module, _inputs: object) -> None:
        """Train this rank's own model, also where forward comes before `begin`."""
        if model.training and torch.is_grad_enabled():
            self._own.take_back()

    def _arrive(self) -> None:
        """Let fragments arrive that left so many steps ago, in one order on all ranks.

        Steps that were left out may have made one late: it counts now.
        """
        delay, mix = self._streaming.delay, self._streaming.mix
        for fragment in self._fragments:
            if fragment.left is not None and self._step - fragment.left >= delay:
                with self._recorder.span("wait for peers", "wait", step=self._step):
                    fragment.wait()
                fragment.arrive(self._lr, mix)
                if self._config.reset_momentum:
                    self._empty_momentum(fragment.parameters)

    def _empty_momentum(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            buffer = self._optimizer.state.get(parameter, {}).get("momentum_buffer")
            if isinstance(buffer, Tensor):
                buffer.zero_()

    def _fits(self, state: Mapping[str, Tensor]) -> bool:
        """Say whether ``state`` was kept by local updates; refuse one of other fragments."""
        starts = {n: t.numel() for n, t in state.items() if _is_start(n)}
        mine = {f"fragment-{i}/start": f.numel for i, f in enumerate(self._fragments)}
        if starts and starts != mine:
            raise CheckpointError(
                f"the checkpoint keeps where {len(starts)} fragments began, the run has "
                f"{len(mine)}: set strategy.fragments back to resume, or start a new run under "
                "another name (init.checkpoint takes the weights along)"
            )
        return bool(starts)


def _is_start(name: str) -> bool:
    return name.startswith("fragment-") and name.endswith("/start")
