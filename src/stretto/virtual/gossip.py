"""Gossip of stacked models: rounds are gathers by index, in the segments and with the delay asked.

`stretto.strategy.gossip.mixer` does the same for one rank.
"""

from abc import ABC, abstractmethod
from collections import deque
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stretto.comm.buckets import WIRE
from stretto.comm.schedule import chunk_bounds
from stretto.optim.combining import pull_, take_in_
from stretto.optim.rules import across, multiply_
from stretto.strategy import GossipConfig
from stretto.strategy.gossip.coded import CODECS
from stretto.strategy.gossip.segments import cut_segments
from stretto.topology import keyed
from stretto.topology.stacked import heard
from stretto.virtual.consensus import StackedConsensus
from stretto.virtual.stack import Stack

_WORD = 2.0**64


class Who(NamedTuple):
    """One round, as tensors beside the values: what a captured graph could look up anew."""

    own: Tensor
    """[P]"""
    who: Tensor
    """[P, k]"""
    weights: Tensor
    """[P, k]; 0 of what is lost on its way."""
    lost: Tensor
    """[P, k]: what those that are lost would have weighed."""


class Exchanges(ABC):
    """Segments of all parties, and the rounds of each that are under way.

    Of all messages, a share of ``lost`` does not arrive: whoever would have heard one goes on
    without it, and whoever sent it does not know.
    """

    own_models = True

    def __init__(
        self, config: GossipConfig, model: nn.Module, stack: Stack, lost: float = 0.0
    ) -> None:
        self._config, self._stack, self._lost_share = config, stack, lost
        self._topology = config.who()
        cut = cut_segments(model, config.segments)
        self._segments = [[stack.values[name].detach() for name, _ in named] for named in cut]
        self._names = [[name for name, _ in named] for named in cut]
        self._wire = WIRE.get(config.wire)
        self._rounds: list[deque[list[Tensor]]] = [deque() for _ in cut]
        self._consensus = StackedConsensus(config, self._segments)

    @abstractmethod
    def before_update(self) -> None:
        """Make values those that an update is made on."""

    @torch.no_grad()
    def after_update(self, step: int, lr: float) -> None:
        """Let every segment take part in the step's round, if there is one; or all meet instead."""
        due = self._consensus.asks or self._config.averages_after(step)
        if due:
            for index in range(len(self._segments)):
                self._begin_again(index)
        elif (step + 1) % self._config.every == 0:
            self._meet_peers(step)
        self._consensus.end(step, met=due)

    def _meet_peers(self, step: int) -> None:
        for index, segment in enumerate(self._segments):
            rounds = self._rounds[index]
            while rounds and len(rounds) >= self._config.delay:
                self._take(index, rounds.popleft())
            who = self._who(step // self._config.every, index, segment[0])
            rounds.append(self._said(index, who))
            if not self._config.delay:
                self._take(index, rounds.popleft())

    @torch.no_grad()
    def means(self) -> dict[str, Tensor]:
        """Return the mean of all, with what is under way."""
        return {
            name: mean
            for index, names in enumerate(self._names)
            for name, mean in zip(names, self._mean(index), strict=True)
        }

    def _mean(self, index: int) -> list[Tensor]:
        return [whole.double().mean(dim=0).to(whole.dtype) for whole in self._whole(index)]

    def _begin_again(self, index: int) -> None:
        """Make a segment of all parties their mean, with nothing under way."""
        for value, mean in zip(self._segments[index], self._mean(index), strict=True):
            value.copy_(mean)
        self._rounds[index].clear()

    def _who(self, number: int, segment: int, like: Tensor) -> Who:
        found = heard(self._topology, self._stack.parties, number, segment)
        gone = found.weights * self._are_lost(number, segment, found.weights.shape)
        own, weights, lost = (
            torch.as_tensor(array, dtype=like.dtype, device=like.device)
            for array in (found.own, found.weights - gone, gone)
        )
        return Who(own, torch.as_tensor(found.who, device=like.device), weights, lost)

    def _are_lost(self, number: int, segment: int, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return which messages of a round are lost, drawn apart from who is told."""
        if not self._lost_share:
            return np.zeros(shape, dtype=bool)
        count = int(np.prod(shape))
        words = keyed.words(count, seed=self._config.seed, step=number, segment=-1 - segment)
        return np.array([word / _WORD < self._lost_share for word in words]).reshape(shape)

    @abstractmethod
    def _said(self, index: int, who: Who) -> list[Tensor]:
        """Return what a round of a segment will change, as of now."""

    @abstractmethod
    def _take(self, index: int, change: list[Tensor]) -> None:
        """Let a round count."""

    @abstractmethod
    def _whole(self, index: int) -> list[Tensor]:
        """Return stacks whose mean is that of the model."""


class Mixed(Exchanges):
    """Parties move by what others had more, or less."""

    def before_update(self) -> None:
        """Do nothing: values are what is updated."""

    def _said(self, index: int, who: Who) -> list[Tensor]:
        return [self._pulled(value, who) for value in self._segments[index]]

    def _pulled(self, value: Tensor, who: Who) -> Tensor:
        told = value if self._wire is None else value.to(self._wire).to(value.dtype)
        others = [told[column] for column in who.who.unbind(1)]
        change = torch.zeros_like(value)
        pull_(change, told, others, who.weights.unbind(1))
        return change

    def _take(self, index: int, change: list[Tensor]) -> None:
        torch._foreach_add_(self._segments[index], change)

    def _whole(self, index: int) -> list[Tensor]:
        return self._segments[index]


class Coded(Mixed):
    """Parties tell how far they are from what all last had in common, in a codec's bytes.

    `stretto.strategy.gossip.coded` has the rule. Members of a group each encode their shard.
    """

    def __init__(
        self, config: GossipConfig, model: nn.Module, stack: Stack, lost: float = 0.0
    ) -> None:
        super().__init__(config, model, stack, lost)
        self._codec = CODECS[config.wire]
        self._width = len(stack.modules) // stack.parties
        self._references = [self._flat(index) for index in range(len(self._segments))]
        self._left = [torch.zeros_like(flat) for flat in self._references]

    def _said(self, index: int, who: Who) -> list[Tensor]:
        self._left[index] += self._flat(index) - self._references[index]
        segment = self._segments[index]
        said = self._decoded(self._left[index])
        self._left[index] -= said
        told = said.to(segment[0].dtype)
        change = torch.zeros_like(told)
        others = [told[column] for column in who.who.unbind(1)]
        pull_(change, told, others, who.weights.unbind(1))
        parts = change.split([value[0].numel() for value in segment], dim=1)
        return [part.view_as(value) for part, value in zip(parts, segment, strict=True)]

    def _begin_again(self, index: int) -> None:
        """Begin again with a new reference, of which nothing is left out."""
        super()._begin_again(index)
        self._references[index] = self._flat(index)
        self._left[index].zero_()

    def _flat(self, index: int) -> Tensor:
        """Return a segment of all parties, [P, n]."""
        flat = torch.cat([value.flatten(1) for value in self._segments[index]], dim=1)
        return flat.to(torch.promote_types(flat.dtype, torch.float32))

    def _decoded(self, wanted: Tensor) -> Tensor:
        """Return what others will understand of it."""
        place = wanted.float().flatten()
        bounds = chunk_bounds(wanted.shape[1], self._width)
        chunks = [end - start for start, end in pairwise(bounds)] * len(wanted)
        work = place.new_empty(self._codec.num_working(chunks, place.device))
        wire = place.new_empty(self._codec.num_bytes(chunks), dtype=torch.uint8)
        self._codec.lay(place, chunks, wire, work).encode()  # and leaves what is decoded
        return place.view_as(wanted).to(wanted.dtype)


class Pushed(Exchanges):
    """Parties give shares away, with their mass, and divide by the mass that they have.

    Mass is nowhere but with a party, under way, or lost: together there is one for each party.
    """

    def __init__(
        self, config: GossipConfig, model: nn.Module, stack: Stack, lost: float = 0.0
    ) -> None:
        super().__init__(config, model, stack, lost)
        self.masses = [torch.ones_like(s[0].flatten(1)[:, 0]) for s in self._segments]
        """[P] of each segment."""
        self.lost_masses = [0.0 for _ in self._segments]
        """Of each segment, what went with messages that did not arrive."""

    @torch.no_grad()
    def before_update(self) -> None:
        """Update values times mass."""
        self._scale(1)

    @torch.no_grad()
    def after_update(self, step: int, lr: float) -> None:
        """Divide by mass again, then let parties meet."""
        self._scale(-1)
        super().after_update(step, lr)

    def _scale(self, power: int) -> None:
        for segment, mass in zip(self._segments, self.masses, strict=True):
            multiply_(segment, [across(mass**power, value) for value in segment])

    def _said(self, index: int, who: Who) -> list[Tensor]:
        mass = self.masses[index]
        added = [_gathered(value * across(mass, value), who) for value in self._segments[index]]
        added.append(_gathered(mass, who))
        self.lost_masses[index] += float((mass[who.who] * who.lost).sum())
        self.masses[index] = mass * who.own
        return added

    def _take(self, index: int, change: list[Tensor]) -> None:
        *added, more = change
        mass = self.masses[index]
        total = mass + more
        take_in_(self._segments[index], mass, added, total)
        self.masses[index] = total

    def under_way(self, index: int) -> float:
        """Return the mass of a segment that has left and not arrived."""
        return sum(float(change[-1].sum()) for change in self._rounds[index])

    def _mean(self, index: int) -> list[Tensor]:
        total = float(self.masses[index].double().sum()) + self.under_way(index)
        return [(whole.double().sum(dim=0) / total).to(whole.dtype) for whole in self._whole(index)]

    def _begin_again(self, index: int) -> None:
        """Begin again with a mass of 1, and nothing lost."""
        super()._begin_again(index)
        self.masses[index] = torch.ones_like(self.masses[index])
        self.lost_masses[index] = 0.0

    def _whole(self, index: int) -> list[Tensor]:
        mass = self.masses[index]
        wholes = [value * across(mass, value) for value in self._segments[index]]
        for change in self._rounds[index]:
            torch._foreach_add_(wholes, change[:-1])
        return wholes


def _gathered(value: Tensor, who: Who) -> Tensor:
    """Return the weighted sum of what each party hears."""
    total = torch.zeros_like(value)
    for column, weight in zip(who.who.unbind(1), who.weights.unbind(1), strict=True):
        total += value[column] * across(weight, value)
    return total
