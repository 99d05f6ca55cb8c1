"""Fragments: parts of a model that local updates synchronise separately."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from stretto.collectives.schedule import Schedule, SubgroupMapping
from stretto.comm.bound_schedule import BoundSchedule
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.transport import CompletedWork, P2POp, Transport, Work
from stretto.strategies.local_updates_config import OuterOptimizer
from stretto.topology import Topology


class FragmentExchange(Protocol):
    """Exchanges one fragment with the peers of a round."""

    buffer: Tensor
    """Flat message buffer; after `wait` it holds the result, which checkpoints keep."""

    def start_round(self, start: Tensor, current: Tensor, number: int) -> None:
        """Start round ``number``.

        Args:
            start: Flat parameters at the beginning of the round, equal on all ranks or not.
            current: Flat parameters now.
            number: Number of the round.
        """
        ...

    def wait(self) -> None:
        """Wait for all messages; the parameters do not change."""
        ...

    def outer_gradient(self, start: Tensor) -> Tensor:
        """Return ``start`` minus the peers' mean, as a new tensor; call it after `wait`."""
        ...


def new_flat_buffer(parameters: Sequence[nn.Parameter], wire: torch.dtype | None = None) -> Tensor:
    """Return an empty flat tensor with one element for each element of ``parameters``.

    Its type is ``wire``, or that of the parameters but at least 32 bits: what a round adds to a
    16-bit parameter may be below its last digit.
    """
    first = parameters[0]
    sum_dtype = wire or torch.promote_types(first.dtype, torch.float32)
    return torch.empty(sum(p.numel() for p in parameters), dtype=sum_dtype, device=first.device)


def shift_lanes(schedule: Schedule) -> Schedule:
    """Return ``schedule`` with all lanes increased by one.

    A fragment's sum may be in flight over several steps while other messages use lane 0, such as
    the broadcast of a checkpoint. Messages of one lane arrive in order, so fragments use other
    lanes.
    """
    placing = SubgroupMapping(range(schedule.size), lane=1)
    name = f"{schedule.name} beside others"
    return replace(schedule, name=name, program=lambda rank: placing.program(schedule, rank))


class AllReduceExchange:
    """All-reduces the differences of all ranks, in the background."""

    def __init__(self, executor: CollectiveExecutor, bound: BoundSchedule) -> None:
        self.buffer = bound.flat
        self._executor, self._bound = executor, bound
        self._work: Work = CompletedWork(time.monotonic())

    def start_round(self, start: Tensor, current: Tensor, number: int) -> None:
        """Start the all-reduce."""
        self.buffer.copy_(start - current)
        self._work = self._executor.start(self._bound)

    def wait(self) -> None:
        """Wait for the all-reduce."""
        self._work.wait()

    def outer_gradient(self, start: Tensor) -> Tensor:
        """Return the mean difference; it has the same bits on all ranks."""
        return self.buffer.to(start.dtype) / self._bound.schedule.size


class PairExchange:
    """Averages with the round's partner, synchronously; a rank without partner keeps its values."""

    def __init__(
        self, transport: Transport, topology: Topology, buffer: Tensor, segment: int
    ) -> None:
        self.buffer = buffer
        self._transport, self._topology, self._segment = transport, topology, segment

    def start_round(self, start: Tensor, current: Tensor, number: int) -> None:
        """Exchange current parameters with the partner and compute the pair's mean."""
        peers = self._topology(self._transport.rank, self._transport.size, number, self._segment)
        received = [torch.empty_like(current) for _ in peers.receives]
        self._transport.exchange(
            [P2POp(edge.rank, current) for edge in peers.sends],
            [
                P2POp(edge.rank, received_value)
                for edge, received_value in zip(peers.receives, received, strict=True)
            ],
        )
        self.buffer.copy_(current * peers.self_weight)
        for edge, received_value in zip(peers.receives, received, strict=True):
            self.buffer.add_(received_value, alpha=edge.weight)

    def wait(self) -> None:
        """Do nothing: `start_round` has waited."""

    def outer_gradient(self, start: Tensor) -> Tensor:
        """Return ``start`` minus the pair's mean."""
        return start - self.buffer


class Fragment:
    """Parameters of one type, with the state of their current round and outer optimizer."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        fragment_turn: int,
        outer: OuterOptimizer,
        exchange: FragmentExchange,
    ) -> None:
        self.parameters = list(parameters)
        self.fragment_turn = fragment_turn
        self.sent_step: int | None = None
        """The step after which the fragment was sent; None if it is not in flight."""
        self._values = [parameter.detach() for parameter in parameters]
        self._outer, self._exchange = outer, exchange
        self.reset()

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return self._start.numel()

    @torch.no_grad()
    def reset(self) -> None:
        """Begin a first round at the current parameters, with zero momentum."""
        self._start = self._current_values()
        self._momenta = [torch.zeros_like(self._start)] if self._outer.has_momentum else []
        self.sent_step = None

    @torch.no_grad()
    def start_round(self, step: int, number: int) -> None:
        """Send the fragment after ``step``, in round ``number``."""
        self._exchange.start_round(self._start, self._current_values(), number)
        self.sent_step = step

    def wait(self) -> None:
        """Wait for the messages in flight; the parameters do not change."""
        if self.sent_step is not None:
            self._exchange.wait()

    @torch.no_grad()
    def finish_round(self, lr: float, mix: float) -> None:
        """Wait, apply the outer optimizer, and move the parameters to its result.

        With ``mix`` below 1 they move only that fraction of the way from their current values.
        """
        self._exchange.wait()
        outer_gradient = self._exchange.outer_gradient(self._start)
        self._outer.rule([self._start], self._momenta, [outer_gradient], lr)
        self._write_values(
            self._start if mix == 1 else self._current_values().lerp_(self._start, mix)
        )
        self.sent_step = None

    def state(self) -> dict[str, Tensor]:
        """Return copies of the start, the momentum and the messages in flight, after waiting."""
        self.wait()
        state = {"start": self._start}
        if self._momenta:
            state["momentum"] = self._momenta[0]
        if self.sent_step is not None:
            state |= {"said": self._exchange.buffer, "left": torch.tensor(self.sent_step)}
        return {name: tensor.clone() for name, tensor in state.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned; messages that were in flight count as received."""
        self._start.copy_(state["start"])
        for momentum in self._momenta:
            momentum.copy_(state.get("momentum", torch.zeros_like(momentum)))
        self.sent_step = int(state["left"]) if "left" in state else None
        if self.sent_step is not None:
            self._exchange.buffer.copy_(state["said"])

    def _current_values(self) -> Tensor:
        """Return the parameters as a new flat tensor."""
        now = new_flat_buffer(self.parameters)
        torch._foreach_copy_(self._views(now), self._values)
        return now

    def _write_values(self, flat: Tensor) -> None:
        torch._foreach_copy_(self._values, self._views(flat))

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([value.numel() for value in self._values])
        return [part.view(value.shape) for part, value in zip(parts, self._values, strict=True)]
