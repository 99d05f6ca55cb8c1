"""The interface between collectives and back ends: send, receive and all-reduce between ranks.

Back ends: processes over Gloo (`gloo`), processes with one GPU each over NCCL (`nccl`), and threads
of one process (`in_process_transports`). That last module also has two wrappers for any transport:
one records every message, one emulates a slow link.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from stretto.cluster.world import Mesh


class P2POp(NamedTuple):
    """One end of a message: the contiguous tensor to send to ``peer``, or to receive into."""

    peer: int
    tensor: Tensor
    lane: int = 0


class Work(Protocol):
    """A handle of a running communication, which owns its buffers until `wait` returns."""

    def wait(self) -> None:
        """Return when the work is done; raise `TransportError` if it failed. May be repeated."""
        ...

    @property
    def finished_s(self) -> float | None:
        """Monotonic time at which the work was done, for timelines; None before that."""
        ...


class Transport(Protocol):
    """One rank's end of a process group. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    @property
    def mesh(self) -> Mesh:
        """The hosts of the group and the ranks on each."""
        ...

    def reserve(self, lanes: int) -> None:
        """Open connections for ``lanes`` lanes; all ranks call this together."""
        ...

    def exchange(self, sends: Sequence[P2POp], receives: Sequence[P2POp]) -> None:
        """Run all sends and receives at once; return when every message has left or arrived.

        Messages between two ranks on one lane arrive in the order in which they were sent. A
        receive buffer must not overlap any other tensor of the same call.
        """
        ...

    def receive(self, p2p_op: P2POp) -> None:
        """Receive one message on the host, without a time-out.

        A lost peer still ends the wait with an error. Several threads may receive at once, from
        different peers.
        """
        ...

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """Start the back end's own sum into ``tensor``.

        Several sums may be in flight; all ranks start them in the same order.
        """
        ...

    def watch_for_timeout(self, description: str, is_completed: Callable[[], bool]) -> None:
        """Have a watchdog check work that the host does not wait for; only GPUs have such work."""
        ...

    def close(self) -> None:
        """Leave the group; nothing may be in flight."""
        ...


@runtime_checkable
class NativeShardCollectives(Protocol):
    """A transport whose back end has its own in-place reduce-scatter and all-gather.

    The tensor consists of one chunk of equal length for each rank, and rank r owns chunk r. The
    collectives of one lane run one after another.
    """

    def start_reduce_scatter(self, tensor: Tensor, lane: int = 0) -> Work:
        """Start to overwrite this rank's chunk of ``tensor`` with its sum over ranks."""
        ...

    def start_all_gather(self, tensor: Tensor, lane: int = 0) -> Work:
        """Start to overwrite every chunk of ``tensor`` with the values of its owner."""
        ...


class CompletedWork:
    """A `Work` that was complete from the start."""

    def __init__(self, finished_s: float) -> None:
        self.finished_s: float | None = finished_s

    def wait(self) -> None:
        """Return at once."""


# --- small collectives that use the back end's own all-reduce ---


def all_reduce_small_(tensor: Tensor, transport: Transport) -> None:
    """Overwrite ``tensor`` with its sum over ranks; all ranks call this with equal sizes."""
    transport.start_all_reduce(tensor.view(-1)).wait()


def all_gather_text(text: str, transport: Transport) -> list[str]:
    """Return the ``text`` of every rank, in rank order; all ranks call this together."""
    data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    lengths = torch.zeros(transport.size, dtype=torch.float64)
    lengths[transport.rank] = len(text.encode())
    all_reduce_small_(lengths, transport)
    ends = torch.cumsum(lengths.long(), 0).tolist()
    starts = [0, *ends[:-1]]
    # Each rank fills its own part of one long text; the sum puts the parts together.
    joined = torch.zeros(max(1, ends[-1]), dtype=torch.float32)
    local_part = slice(starts[transport.rank], ends[transport.rank])
    joined[local_part] = data[: local_part.stop - local_part.start].float()
    all_reduce_small_(joined, transport)
    encoded = bytes(joined.to(torch.uint8).tolist())
    return [encoded[start:end].decode() for start, end in zip(starts, ends, strict=True)]


def barrier(transport: Transport) -> None:
    """Return once every rank has called `barrier`."""
    all_reduce_small_(torch.zeros(1), transport)
