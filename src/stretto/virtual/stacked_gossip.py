"""Gossip of stacked models: a round gathers the rows of all peers by index, segment by segment.

`stretto.strategies.gossip.mixer` does the same for one rank, by messages.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stretto.collectives.codecs import WIRE_DTYPES
from stretto.collectives.schedule import chunk_bounds
from stretto.optim.rules import (
    add_weighted_differences_,
    merge_push_sum_,
    multiply_,
    unsqueeze_like,
)
from stretto.program.blocks import cut_segments
from stretto.strategies import GossipConfig
from stretto.strategies.gossip.coded_wire import CODECS
from stretto.strategies.gossip.consensus import ConsensusConfig, distance, sample_coordinates
from stretto.topology import keyed_random as keyed
from stretto.topology.round_peers import stacked_round
from stretto.virtual.stacked_models import StackedModels


class StackedConsensus:
    """Estimates the consensus distance of all replicas from a sample, as real ranks do.

    Like `stretto.strategies.gossip.consensus`: the distance at the start of a step is known when
    the next step begins. That next step ends with an exact average if the distance is too large.
    Nothing is measured where the config has no `consensus_limit`.
    """

    def __init__(self, config: ConsensusConfig, segments: Sequence[Sequence[Tensor]]) -> None:
        """Take ``segments`` of [P, ...] parameters, first layers first.

        Real ranks number segments from the last layer, so the order is reversed here.
        """
        self._config, self._segments = config, list(segments)[::-1]
        sizes = [sum(value[0].numel() for value in values) for values in self._segments]
        self._sample = sample_coordinates(sizes, config.consensus_sample)
        self.is_exact_average_due = False
        """Whether the next step is to end with an exact average."""
        self._distance_at_start = 0.0

    def end(self, step: int, *, has_averaged: bool) -> None:
        """Decide whether the next step ends with an exact average, then measure for the one after.

        The decision uses the distance at the start of ``step``. None is due if ``has_averaged``:
        then ``step`` itself ended with an exact average.
        """
        limit = self._config.consensus_limit
        if limit is None:
            return
        self.is_exact_average_due = (
            self._config.measures_in(step) and self._distance_at_start > limit and not has_averaged
        )
        if self._config.measures_in(step + 1):
            self._distance_at_start = self._distance()

    def _distance(self) -> float:
        sampled_values, norms = [], 0.0
        for values, indices in zip(self._segments, self._sample.indices, strict=True):
            flat = torch.cat([value.flatten(1) for value in values], dim=1).double()
            sampled_values.append(flat[:, torch.from_numpy(indices).to(flat.device)])
            norms += float(flat.square().sum())
        rows = torch.cat(sampled_values, dim=1).cpu().numpy()
        weights = self._sample.weights
        squares = float((weights * np.square(rows)).sum())
        return distance(rows.sum(axis=0), weights, squares, norms, len(rows))


_WORD_RANGE = 2.0**64
"""Random words are uniform in [0, 2**64)."""


class StackedRoundPeers(NamedTuple):
    """Peers and weights of all replicas in one round, as tensors on the parameters' device."""

    self_weight: Tensor
    """[P]: the weight of each replica's own parameters."""
    indices: Tensor
    """[P, k]: the replicas that each one receives from."""
    weights: Tensor
    """[P, k]: the weight of each received message; 0 where it is lost."""
    lost: Tensor
    """[P, k]: the weight that a lost message would have had; 0 where it arrives."""


class StackedGossip(ABC):
    """Gossip rounds of all replicas, segment by segment, with the rounds in flight.

    The share ``lost`` of all messages never arrives: the receiver continues without the message,
    and the sender does not notice.
    """

    replicas_differ = True

    def __init__(
        self, config: GossipConfig, model: nn.Module, stack: StackedModels, lost: float = 0.0
    ) -> None:
        self._config, self._stack, self._lost_share = config, stack, lost
        self._topology = config.build_topology()
        cut = cut_segments(model, config.segments)
        self._segments = [[stack.values[name].detach() for name, _ in named] for named in cut]
        self._names = [[name for name, _ in named] for named in cut]
        self._wire = WIRE_DTYPES.get(config.wire)
        self._rounds: list[deque[list[Tensor]]] = [deque() for _ in cut]
        self._consensus = StackedConsensus(config, self._segments)

    def after_backward(self, step: int) -> None:  # noqa: B027 - most replicas keep their gradients
        """Do nothing: the gradients stay those of each replica."""

    @abstractmethod
    def before_update(self) -> None:
        """Turn the parameters into the values that the optimizer updates."""

    @torch.no_grad()
    def after_update(self, step: int, lr: float) -> None:
        """Average exactly if that is due after ``step``; else run the round of ``step``, if any."""
        due = self._consensus.is_exact_average_due or self._config.averages_exactly_after(step)
        if due:
            for index in range(len(self._segments)):
                self._reset_to_mean(index)
        elif (step + 1) % self._config.every == 0:
            self._exchange_with_peers(step)
        self._consensus.end(step, has_averaged=due)

    def _exchange_with_peers(self, step: int) -> None:
        for index, segment in enumerate(self._segments):
            rounds = self._rounds[index]
            while rounds and len(rounds) >= self._config.delay:
                self._apply_change(index, rounds.popleft())
            peers = self._round_peers(step // self._config.every, index, segment[0])
            rounds.append(self._compute_change(index, peers))
            if not self._config.delay:
                self._apply_change(index, rounds.popleft())

    @torch.no_grad()
    def means(self) -> dict[str, Tensor]:
        """Return the mean of all replicas, in-flight rounds included, by parameter name."""
        return {
            name: mean
            for index, names in enumerate(self._names)
            for name, mean in zip(names, self._segment_means(index), strict=True)
        }

    def _segment_means(self, index: int) -> list[Tensor]:
        return [
            whole.double().mean(dim=0).to(whole.dtype) for whole in self._values_to_average(index)
        ]

    def _reset_to_mean(self, index: int) -> None:
        """Set a segment of all replicas to its mean, and drop the rounds in flight."""
        for value, mean in zip(self._segments[index], self._segment_means(index), strict=True):
            value.copy_(mean)
        self._rounds[index].clear()

    def _round_peers(self, round_number: int, segment: int, like: Tensor) -> StackedRoundPeers:
        found = stacked_round(self._topology, self._stack.num_replicas, round_number, segment)
        lost_weights = found.weights * self._draw_lost(round_number, segment, found.weights.shape)
        self_weight, weights, lost = (
            torch.as_tensor(array, dtype=like.dtype, device=like.device)
            for array in (found.self_weight, found.weights - lost_weights, lost_weights)
        )
        return StackedRoundPeers(
            self_weight, torch.as_tensor(found.who, device=like.device), weights, lost
        )

    def _draw_lost(
        self, round_number: int, segment: int, shape: tuple[int, ...]
    ) -> NDArray[np.bool_]:
        """Return a mask of the lost messages of a round, drawn independently of the peers."""
        if not self._lost_share:
            return np.zeros(shape, dtype=bool)
        count = int(np.prod(shape))
        # Negative segment numbers give a random stream that no draw of peers uses.
        draws = keyed.random_words(
            count, seed=self._config.seed, step=round_number, segment=-1 - segment
        )
        return np.array([draw / _WORD_RANGE < self._lost_share for draw in draws]).reshape(shape)

    @abstractmethod
    def _compute_change(self, index: int, peers: StackedRoundPeers) -> list[Tensor]:
        """Return the change that a round makes to a segment, from the current parameters."""

    @abstractmethod
    def _apply_change(self, index: int, change: list[Tensor]) -> None:
        """Add the ``change`` of a completed round to a segment."""

    @abstractmethod
    def _values_to_average(self, index: int) -> list[Tensor]:
        """Return stacked tensors whose mean over replicas is the mean model."""


class StackedMixing(StackedGossip):
    """D-PSGD and crossover: add the weighted differences to the peers' parameters."""

    def before_update(self) -> None:
        """Do nothing: the optimizer updates the parameters themselves."""

    def _compute_change(self, index: int, peers: StackedRoundPeers) -> list[Tensor]:
        return [self._pull_change(value, peers) for value in self._segments[index]]

    def _pull_change(self, value: Tensor, peers: StackedRoundPeers) -> Tensor:
        sent = value if self._wire is None else value.to(self._wire).to(value.dtype)
        others = [sent[column] for column in peers.indices.unbind(1)]
        change = torch.zeros_like(value)
        add_weighted_differences_(change, sent, others, peers.weights.unbind(1))
        return change

    def _apply_change(self, index: int, change: list[Tensor]) -> None:
        torch._foreach_add_(self._segments[index], change)

    def _values_to_average(self, index: int) -> list[Tensor]:
        return self._segments[index]


class StackedGradientMixing(StackedMixing):
    """Averages the replicas' gradients with those of peers, and never their parameters.

    `stretto.strategies.gossip.gradients` does the same for one rank.
    """

    @torch.no_grad()
    def after_backward(self, step: int) -> None:
        """Average the gradients if ``step`` ends with a round; an exact average replaces none."""
        if (step + 1) % self._config.every:
            return
        for index, segment in enumerate(self._segments):
            peers = self._round_peers(step // self._config.every, index, segment[0])
            gradients = [
                value.grad
                for value in (self._stack.values[name] for name in self._names[index])
                if value.grad is not None
            ]
            changes = [self._pull_change(gradient, peers) for gradient in gradients]
            torch._foreach_add_(gradients, changes)

    def _exchange_with_peers(self, step: int) -> None:
        """Do nothing: parameters are not exchanged."""


class StackedCodedMixing(StackedMixing):
    """Gossip whose messages a codec compresses: differences to a shared reference are sent.

    `stretto.strategies.gossip.coded_wire` describes the rule. Each member of a group encodes its
    own shard.
    """

    def __init__(
        self, config: GossipConfig, model: nn.Module, stack: StackedModels, lost: float = 0.0
    ) -> None:
        super().__init__(config, model, stack, lost)
        self._codec = CODECS[config.wire]
        self._width = len(stack.modules) // stack.num_replicas
        self._references = [self._flat(index) for index in range(len(self._segments))]
        self._residuals = [torch.zeros_like(flat) for flat in self._references]

    def _compute_change(self, index: int, peers: StackedRoundPeers) -> list[Tensor]:
        self._residuals[index] += self._flat(index) - self._references[index]
        segment = self._segments[index]
        decoded = self._decode(self._residuals[index])
        self._residuals[index] -= decoded
        sent = decoded.to(segment[0].dtype)
        change = torch.zeros_like(sent)
        others = [sent[column] for column in peers.indices.unbind(1)]
        add_weighted_differences_(change, sent, others, peers.weights.unbind(1))
        parts = change.split([value[0].numel() for value in segment], dim=1)
        return [part.view_as(value) for part, value in zip(parts, segment, strict=True)]

    def _reset_to_mean(self, index: int) -> None:
        """Take the mean as the new reference, with residuals of zero."""
        super()._reset_to_mean(index)
        self._references[index] = self._flat(index)
        self._residuals[index].zero_()

    def _flat(self, index: int) -> Tensor:
        """Return a segment of all replicas as one [P, n] tensor, in fp32 or wider."""
        flat = torch.cat([value.flatten(1) for value in self._segments[index]], dim=1)
        return flat.to(torch.promote_types(flat.dtype, torch.float32))

    def _decode(self, residual: Tensor) -> Tensor:
        """Return ``residual`` as the receivers decode it: encoded, then decoded."""
        flat = residual.float().flatten()
        bounds = chunk_bounds(residual.shape[1], self._width)
        chunks = [end - start for start, end in pairwise(bounds)] * len(residual)
        work = flat.new_empty(self._codec.workspace_numel(chunks, flat.device))
        wire = flat.new_empty(self._codec.num_bytes(chunks), dtype=torch.uint8)
        # encode() also overwrites ``flat`` with the decoded values.
        self._codec.bind(flat, chunks, wire, work).encode()
        return flat.view_as(residual).to(residual.dtype)


class StackedPushSum(StackedGossip):
    """Push-sum gossip (SGP): replicas send weighted parameters with mass, and divide by their mass.

    Mass is held by a replica, in flight, or lost. The total is always the number of replicas.
    """

    def __init__(
        self, config: GossipConfig, model: nn.Module, stack: StackedModels, lost: float = 0.0
    ) -> None:
        super().__init__(config, model, stack, lost)
        self.masses = [torch.ones_like(s[0].flatten(1)[:, 0]) for s in self._segments]
        """The mass of every replica, [P], by segment."""
        self.lost_masses = [0.0 for _ in self._segments]
        """The mass that was lost with messages that did not arrive, by segment."""

    @torch.no_grad()
    def before_update(self) -> None:
        """Multiply the parameters by their mass: the optimizer updates the undivided values."""
        self._scale(1)

    @torch.no_grad()
    def after_update(self, step: int, lr: float) -> None:
        """Divide the parameters by their mass again, then run the round of ``step``, if any."""
        self._scale(-1)
        super().after_update(step, lr)

    def _scale(self, power: int) -> None:
        for segment, mass in zip(self._segments, self.masses, strict=True):
            multiply_(segment, [unsqueeze_like(mass**power, value) for value in segment])

    def _compute_change(self, index: int, peers: StackedRoundPeers) -> list[Tensor]:
        mass = self.masses[index]
        added = [
            _weighted_sum(value * unsqueeze_like(mass, value), peers)
            for value in self._segments[index]
        ]
        added.append(_weighted_sum(mass, peers))
        self.lost_masses[index] += float((mass[peers.indices] * peers.lost).sum())
        self.masses[index] = mass * peers.self_weight
        return added

    def _apply_change(self, index: int, change: list[Tensor]) -> None:
        *added, more = change
        mass = self.masses[index]
        total = mass + more
        merge_push_sum_(self._segments[index], mass, added, total)
        self.masses[index] = total

    def in_flight_mass(self, index: int) -> float:
        """Return the mass of a segment that was sent and has not arrived."""
        return sum(float(change[-1].sum()) for change in self._rounds[index])

    def _segment_means(self, index: int) -> list[Tensor]:
        total = float(self.masses[index].double().sum()) + self.in_flight_mass(index)
        return [
            (whole.double().sum(dim=0) / total).to(whole.dtype)
            for whole in self._values_to_average(index)
        ]

    def _reset_to_mean(self, index: int) -> None:
        """Set the segment to its mean, every mass to 1 and the lost mass to 0."""
        super()._reset_to_mean(index)
        self.masses[index] = torch.ones_like(self.masses[index])
        self.lost_masses[index] = 0.0

    def _values_to_average(self, index: int) -> list[Tensor]:
        mass = self.masses[index]
        wholes = [value * unsqueeze_like(mass, value) for value in self._segments[index]]
        for change in self._rounds[index]:
            torch._foreach_add_(wholes, change[:-1])
        return wholes


def _weighted_sum(value: Tensor, peers: StackedRoundPeers) -> Tensor:
    """Return for each replica the weighted sum of the messages that it receives."""
    total = torch.zeros_like(value)
    for column, weight in zip(peers.indices.unbind(1), peers.weights.unbind(1), strict=True):
        total += value[column] * unsqueeze_like(weight, value)
    return total
