"""What a codec is, to whoever lays messages out.

Note: rounded at home too. Encoding also overwrites the place it encodes by what the other end will
decode, so both ends of a message hold the same bits, and an exchange adds the same two numbers at
both. Encoding what was decoded must give the same bytes: a relay then passes on exactly what it
was given, and two lanes may send one place at the same time. A sum that nobody is sent (see
`unsent_sums`) is rounded where it was made.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stretto.comm.schedule import Action, Round


class Laid(Protocol):
    """A stretch of a tensor beside its room on the wire, both fixed; using it allocates nothing."""

    def encode(self) -> None:
        """Write the stretch to the wire, and make the stretch what the wire says."""
        ...

    def decode(self) -> None:
        """Make the stretch what the wire says."""
        ...


class Codec(Protocol):
    """A way to write stretches of a tensor as bytes, chunk by chunk.

    How a chunk is encoded depends on that chunk alone, not on the message it is part of.
    """

    @property
    def name(self) -> str:
        """What must be equal on all ranks, in words."""
        ...

    def check(self, tensor: Tensor) -> None:
        """Raise `ScheduleError` if ``tensor`` cannot be encoded."""
        ...

    def num_bytes(self, chunks: Sequence[int]) -> int:
        """Return what chunks of these lengths take on the wire."""
        ...

    def num_working(self, chunks: Sequence[int], device: torch.device) -> int:
        """Return how many elements of the tensor's type `lay` needs to work in on ``device``."""
        ...

    def lay(self, place: Tensor, chunks: Sequence[int], wire: Tensor, work: Tensor) -> Laid:
        """Pair ``place``, chunks of these lengths, with ``wire``; ``work`` is free between uses."""
        ...


def unsent_sums(rounds: Sequence[Round], num_chunks: int) -> list[list[tuple[int, int]]]:
    """Return for each round the chunk ranges it adds to that are neither sent nor copied later.

    The other ranks are given what encoding left of the same sums, so these must be rounded too.
    """
    last = np.full(num_chunks, -1)
    for index, batch in enumerate(rounds):
        # What a round sends has left before what it receives is added.
        for op in sorted(batch.ops, key=lambda op: op.action is Action.ADD):
            last[op.start : op.stop] = index if op.action is Action.ADD else -1
    ranges: list[list[tuple[int, int]]] = [[] for _ in rounds]
    edges = [0, *(np.flatnonzero(np.diff(last)) + 1).tolist(), num_chunks]
    for start, stop in pairwise(edges):
        if last[start] >= 0:
            ranges[int(last[start])].append((start, stop))
    return ranges
