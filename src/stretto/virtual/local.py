"""Local updates of stacked models: rounds in which all parties, or pairs, begin again together.

`stretto.strategy.local` does the same for one rank.
"""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.optim.rules import across
from stretto.strategy import LocalConfig, NoLoCoConfig
from stretto.strategy.local.fragment import cut_fragments
from stretto.topology.stacked import heard
from stretto.virtual.stack import Stack


class Rounds:
    """Fragments of all parties."""

    own_models = True

    def __init__(
        self, config: LocalConfig, model: nn.Module, stack: Stack, optimizer: Optimizer
    ) -> None:
        self._config, self._stack, self._optimizer = config, stack, optimizer
        cut = cut_fragments(model, config.streaming().fragments)
        self._fragments = [
            _Fragment(turn, [stack.values[name] for name, _ in named]) for turn, named in cut
        ]

    def before_update(self) -> None:
        """Do nothing."""

    @torch.no_grad()
    def after_update(self, step: int, lr: float) -> None:
        """Let those arrive that were to be here by now, and those leave whose turn it is."""
        self._arrive(step, lr)
        turn = self._config.turn(step)
        for fragment in self._fragments:
            if fragment.turn == turn:
                fragment.leave(step, self._moved(fragment, step // self._config.every))
        self._arrive(step, lr)

    def means(self) -> dict[str, Tensor]:
        """Return the mean of all."""
        return self._stack.means()

    def _moved(self, fragment: "_Fragment", number: int) -> list[Tensor]:
        """Return how far the peers' mean is below where each party began."""
        if not isinstance(self._config, NoLoCoConfig):
            steps = [start - now for start, now in fragment.both()]
            return [step.mean(dim=0, keepdim=True).expand_as(step).clone() for step in steps]
        found = heard(self._config.who(), self._stack.parties, number, fragment.turn)
        moved = []
        for start, now in fragment.both():
            own, weights = (torch.as_tensor(a).to(now) for a in (found.own, found.weights))
            mean = now * across(own, now)
            for column, weight in zip(found.who.T, weights.unbind(1), strict=True):
                mean += now[column] * across(weight, now)
            moved.append(start - mean)
        return moved

    def _arrive(self, step: int, lr: float) -> None:
        streaming, outer = self._config.streaming(), self._config.outer()
        for fragment in self._fragments:
            if fragment.left is None or step - fragment.left < streaming.delay:
                continue
            outer.rule(fragment.starts, fragment.momenta, fragment.moved, lr)
            fragment.begin_again(streaming.mix)
            if self._config.reset_momentum:
                self._empty_momentum(fragment)

    def _empty_momentum(self, fragment: "_Fragment") -> None:
        for value in fragment.values:
            buffer = self._optimizer.state.get(value, {}).get("momentum_buffer")
            if isinstance(buffer, Tensor):
                buffer.zero_()


class _Fragment:
    """One fragment of all parties: where its round began, and what is under way."""

    def __init__(self, turn: int, values: list[nn.Parameter]) -> None:
        self.turn, self.values = turn, values
        self.starts = [
            v.detach().to(torch.promote_types(v.dtype, torch.float32), copy=True) for v in values
        ]
        self.momenta = [torch.zeros_like(start) for start in self.starts]
        self.left: int | None = None
        self.moved: list[Tensor] = []

    def both(self) -> list[tuple[Tensor, Tensor]]:
        """Return where the round began, and where parties are now."""
        now = [v.detach().to(s.dtype) for v, s in zip(self.values, self.starts, strict=True)]
        return list(zip(self.starts, now, strict=True))

    def leave(self, step: int, moved: list[Tensor]) -> None:
        """Note how far the steps up to ``step`` have led."""
        self.left, self.moved = step, moved

    def begin_again(self, mix: float) -> None:
        """Go ``mix`` of the way to where the next round begins."""
        for value, (start, now) in zip(self.values, self.both(), strict=True):
            value.copy_(start if mix == 1 else now.lerp(start, mix))
        self.left, self.moved = None, []
