"""What repeats in training: so much computation, and messages that leave and are due along it.

Note: the line. A rank computes one thing after another, so what it has computed since a period
began, in seconds, says where it is: on a line. A message leaves when its rank has come to one place
of the line, and the rank passes another place only when the message has arrived. How strategies
differ is where these two places are: gradients are due before the update, a segment of gossip
before the forward that uses it, or so many rounds later. Waiting is no part of the line.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exchange:
    """What all ranks say and hear of one bucket, segment or fragment in each period."""

    num_bytes: float
    """That one message of it has, or the tensor that all ranks sum."""
    leaves_s: float
    """Its place of departure, in seconds of computation since the period began."""
    due_s: float
    """Where nobody goes on without it; not before it leaves, and perhaps in a later period."""
    lane: int = 0
    """Exchanges of one lane follow each other."""
    number: int = 0
    """Of the segment, for topologies that draw peers for each."""
    inside: bool = False
    """Whether it goes round the members of a group, instead of to peers."""
    hops: int = 1
    """Messages that follow each other in it: each has the latency of the way."""
    follows: int | None = None
    """The exchange, by its place in the period, without which it cannot leave."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """A period: as many steps as there are from one round to the next."""

    compute_s: float
    """What a rank computes in it: the length of the line."""
    exchanges: tuple[Exchange, ...] = ()
    """In the order in which they leave."""
    steps: int = 1
    slowdown: float = 1.0
    """How many times as long computation takes while messages travel."""

    @property
    def lag(self) -> int:
        """How many periods the latest message may be under way, at the most."""
        longest_s = max((e.due_s - e.leaves_s for e in self.exchanges), default=0.0)
        return round(longest_s / self.compute_s) if self.compute_s else 0
