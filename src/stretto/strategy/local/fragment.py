"""Fragments: parts of a model, each of which begins again together with those of its peers."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from stretto.errors import ConfigError
from stretto.strategy.gossip.segments import Named, cut_segments
from stretto.strategy.local.config import Outer
from stretto.strategy.local.travel import Travel, room_for


def cut_fragments(model: nn.Module, count: int) -> list[tuple[int, list[Named]]]:
    """Return ``count`` parts of about as many bytes, each with its turn.

    Parameters of one turn that are of different types are parts of their own.

    Raises:
        ConfigError: The model has fewer trainable parameters than parts.
    """
    trainable = sum(p.requires_grad for p in model.parameters())
    if trainable and count > trainable:
        raise ConfigError(
            f"strategy.fragments = {count}: the model has {trainable} trainable parameters, none "
            f"of which is cut: take at most {trainable}"
        )
    cut = cut_segments(model, f"balanced {count}")
    return [(index * count // len(cut), named) for index, named in enumerate(cut)]


class Fragment:
    """Parameters of one type: where their round began, and where the next one will."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], turn: int, outer: Outer, travel: Travel
    ) -> None:
        self.parameters = list(parameters)
        self.turn = turn
        self.left: int | None = None
        """The step after which it left; None while it is not under way."""
        self._values = [parameter.detach() for parameter in parameters]
        self._outer, self._travel = outer, travel
        self.begin_anew()

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return self._start.numel()

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Begin a first round where the parameters are."""
        self._start = self._now()
        self._momenta = [torch.zeros_like(self._start)] if self._outer.remembers else []
        self.left = None

    @torch.no_grad()
    def leave(self, step: int, number: int) -> None:
        """Tell the peers of round ``number`` how far the steps up to ``step`` have led."""
        self._travel.leave(self._start, self._now(), number)
        self.left = step

    def wait(self) -> None:
        """Wait for what is under way; it does not count by that."""
        if self.left is not None:
            self._travel.wait()

    @torch.no_grad()
    def arrive(self, lr: float, mix: float) -> None:
        """Find where all begin again, and go ``mix`` of the way there."""
        self._travel.wait()
        moved = self._travel.moved(self._start)
        self._outer.rule([self._start], self._momenta, [moved], lr)
        self._put(self._start if mix == 1 else self._now().lerp_(self._start, mix))
        self.left = None

    def state(self) -> dict[str, Tensor]:
        """Return copies of where it began, of what it remembers and of what is under way."""
        self.wait()
        state = {"start": self._start}
        if self._momenta:
            state["momentum"] = self._momenta[0]
        if self.left is not None:
            state |= {"said": self._travel.room, "left": torch.tensor(self.left)}
        return {name: tensor.clone() for name, tensor in state.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take it back: what was under way is there."""
        self._start.copy_(state["start"])
        for momentum in self._momenta:
            momentum.copy_(state.get("momentum", torch.zeros_like(momentum)))
        self.left = int(state["left"]) if "left" in state else None
        if self.left is not None:
            self._travel.room.copy_(state["said"])

    def _now(self) -> Tensor:
        """Return the parameters side by side, as a new tensor."""
        now = room_for(self.parameters)
        torch._foreach_copy_(self._views(now), self._values)
        return now

    def _put(self, flat: Tensor) -> None:
        torch._foreach_copy_(self._values, self._views(flat))

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([value.numel() for value in self._values])
        return [part.view(value.shape) for part, value in zip(parts, self._values, strict=True)]
