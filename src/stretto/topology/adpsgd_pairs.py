"""Asynchronous pairwise averaging (AD-PSGD): the pairs, and reproducible orders of operations.

Ranks are active (even) or passive (odd). An active rank contacts a passive one, which answers at
any time. If any rank could contact any other, ranks could wait for each other in a cycle. Between
active and passive ranks there is no such deadlock (Lian et al., 2018, arXiv:1710.06952).

In a real run the arrival of messages decides the order. Tests and virtual workers need an order
that is reproducible; they use `random_operation_order`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from stretto.topology import keyed_random as keyed

_ORDER_SEGMENT = -1
"""The segment key of draws for the order of operations, minus the first step of a resumed run.
It is negative, so that it differs from the segment keys of `passive_peer`, which are ranks."""
_WORDS_PER_DRAW = 256
"""Number of random words drawn at once."""


class OperationKind(StrEnum):
    """The atomic operations of a worker."""

    READ = "read"
    """Begin a step: read the model, at which the gradient will be computed."""
    APPLY = "apply"
    """End the step: apply its gradient to the current model."""
    AVERAGE = "average"
    """Replace the model, and that of a peer, by the mean of both; follows an `APPLY`."""


class WorkerOperation(NamedTuple):
    """One operation of one worker."""

    kind: OperationKind
    worker: int
    step: int
    """Step of this worker, counted from 0."""
    peer: int
    """The rank it averages with; the worker itself for other operations."""


def is_active(rank: int) -> bool:
    """Return whether a rank contacts others; passive ranks only answer."""
    return rank % 2 == 0


def passive_ranks(size: int) -> range:
    """Return the ranks that answer: the odd ones."""
    return range(1, size, 2)


def active_ranks(size: int) -> range:
    """Return the ranks that contact others: the even ones."""
    return range(0, size, 2)


def passive_peer(rank: int, size: int, step: int, seed: int = 0) -> int | None:
    """Return the uniformly random passive peer of ``rank`` after ``step``.

    It depends on (seed, step, rank) only, so a resumed run has the same peers. Return None for
    passive ranks, and if there are no passive ranks.
    """
    passive = passive_ranks(size)
    if not is_active(rank) or not passive:
        return None
    (word,) = keyed.random_words(1, seed=seed, step=step, segment=rank)
    return passive[keyed.word_to_index(len(passive), word)]


def random_operation_order(
    size: int,
    steps: int,
    seed: int = 0,
    relative_speeds: Sequence[int] | None = None,
    *,
    first: int = 0,
    max_lead: int | None = None,
) -> Iterator[WorkerOperation]:
    """Yield the operations of ``size`` workers, ``steps`` steps each, in an order by ``seed``.

    Every order that real ranks can produce is possible. A worker reads, applies, and reads again.
    An active worker averages once after each step, at the latest during the next step.

    Args:
        size: Number of workers.
        steps: Steps of each worker.
        seed: Seed of the order and of the peers.
        relative_speeds: How often each worker is chosen, relative to the others.
        first: The first step. All workers have ended the steps before it.
        max_lead: A worker waits before it begins a step this many steps ahead of the slowest
            worker's next step; None: it never waits.
    """
    workers = [
        _WorkerProgress(rank, size, first + steps, seed, *[first] * 3) for rank in range(size)
    ]
    weights = relative_speeds or [1] * size
    random_stream = _random_word_stream(seed, first)
    while True:
        blocked_step = (
            None if max_lead is None else min(worker.steps_read for worker in workers) + max_lead
        )
        choices = [
            (worker, kind) for worker in workers for kind in worker.allowed_operations(blocked_step)
        ]
        if not choices:
            return
        remaining = keyed.word_to_index(
            sum(weights[worker.rank] for worker, _ in choices), next(random_stream)
        )
        for worker, kind in choices:
            remaining -= weights[worker.rank]
            if remaining < 0:
                yield worker.perform(kind)
                break


@dataclass(slots=True)
class _WorkerProgress:
    """Progress of one worker: numbers of steps begun, applied and averaged after."""

    rank: int
    size: int
    end: int
    """The step after the last one."""
    seed: int
    steps_read: int
    steps_applied: int
    steps_averaged: int

    def allowed_operations(self, blocked_step: int | None) -> list[OperationKind]:
        """Return the operations that are allowed next; step ``blocked_step`` may not begin yet."""
        averages = is_active(self.rank) and len(passive_ranks(self.size)) > 0
        allowed_operations = []
        if self.steps_read > self.steps_applied:
            allowed_operations.append(OperationKind.APPLY)
        elif self.steps_read not in (self.end, blocked_step) and not (
            averages and self.steps_averaged + 1 < self.steps_applied
        ):
            allowed_operations.append(OperationKind.READ)
        if averages and self.steps_averaged < self.steps_applied:
            allowed_operations.append(OperationKind.AVERAGE)
        return allowed_operations

    def perform(self, kind: OperationKind) -> WorkerOperation:
        """Record that ``kind`` was performed; return it as a `WorkerOperation`."""
        peer: int | None = None
        if kind is OperationKind.READ:
            step, self.steps_read = self.steps_read, self.steps_read + 1
        elif kind is OperationKind.APPLY:
            step, self.steps_applied = self.steps_applied, self.steps_applied + 1
        else:
            step, self.steps_averaged = self.steps_averaged, self.steps_averaged + 1
            peer = passive_peer(self.rank, self.size, step, self.seed)
        return WorkerOperation(kind, self.rank, step, self.rank if peer is None else peer)


def _random_word_stream(seed: int, first: int) -> Iterator[int]:
    block = 0
    while True:
        yield from keyed.random_words(
            _WORDS_PER_DRAW, seed=seed, step=block, segment=_ORDER_SEGMENT - first
        )
        block += 1
