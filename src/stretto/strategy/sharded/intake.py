"""Takes a unit's gradients, as backward makes them, to where they travel from."""

from typing import NamedTuple

import torch
from torch import Tensor

from stretto.strategy.sharded.storage import UnitStorage


class _Way(NamedTuple):
    """From a stretch of a tensor's gradient to its place among those of a block."""

    place: Tensor
    start: int
    stop: int


class Intake:
    """The gradients of one unit in one step: who has come, who is missing."""

    def __init__(self, storage: UnitStorage) -> None:
        self._ways: list[list[_Way]] = [[] for _ in storage.parameters]
        self._marks: list[Tensor] = []
        self._mark_places: list[list[tuple[int, int, int]]] = [[] for _ in storage.parameters]
        for index, (block, flat) in enumerate(
            zip(storage.layout.blocks, storage.gradients, strict=True)
        ):
            for s in block.stretches:
                first = block.gradient_start(s.owner) + s.place
                view = flat[first : first + s.length]
                self._ways[s.tensor].append(_Way(view, s.start, s.start + s.length))
                self._mark_places[s.tensor].append((index, s.owner, s.mark))
            rows = flat.view(block.ranks, block.chunk + block.marks)
            self._marks.append(rows[:, block.chunk :])
        self.begin()

    def begin(self) -> None:
        """Forget what came in the step before."""
        self._absent = set(range(len(self._ways)))

    @property
    def absent(self) -> list[int]:
        """The parameters whose gradients have not come."""
        return sorted(self._absent)

    def put(self, tensor: int, gradient: Tensor, weight: float = 1.0) -> None:
        """Take in one gradient, times ``weight``."""
        dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
        flat = dense.reshape(-1)
        for place, start, stop in self._ways[tensor]:
            place.copy_(flat[start:stop])
            if weight != 1.0:
                place.mul_(weight)
        self._absent.discard(tensor)

    def close(self) -> None:
        """Let zeros stand for what has not come, and mark what has."""
        for marks in self._marks:
            marks.fill_(1)
        for tensor in self._absent:
            for way in self._ways[tensor]:
                way.place.zero_()
            for block, owner, mark in self._mark_places[tensor]:
                self._marks[block][owner, mark] = 0

    def nobody_had(self, block: int, owner: int, tensor: int, mark: int) -> bool:
        """Say, of sums, whether no rank had a gradient of ``tensor``; reads one mark if need be."""
        if tensor not in self._absent:
            return False
        return not bool(self._marks[block][owner, mark] > 0)
