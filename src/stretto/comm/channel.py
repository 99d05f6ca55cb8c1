"""The seam under every collective: what a rank can do with its peers.

Processes over Gloo (`gloo`), processes with a GPU each over NCCL (`nccl`), and threads of one
process (`local`); a recorder (`recording`) or a slow link (`emulated`) may be put around any.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from stretto.cluster.world import Mesh


class Parcel(NamedTuple):
    """A contiguous tensor that leaves for ``peer``, or the place where one from it will land."""

    peer: int
    tensor: Tensor
    lane: int = 0


class Pending(Protocol):
    """Something started that owns its buffers until `wait` returns."""

    def wait(self) -> None:
        """Return when it is done; raise `ChannelError` when it failed. May be called again."""
        ...

    @property
    def finished_s(self) -> float | None:
        """Monotonic time at which it was done, for time-lines; None while it is not."""
        ...


class Channel(Protocol):
    """A rank's end of a group; all members call the same things in the same order."""

    @property
    def rank(self) -> int:
        """My place in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of members."""
        ...

    @property
    def mesh(self) -> Mesh:
        """Which members share a host."""
        ...

    def reserve(self, lanes: int) -> None:
        """Make ready for messages on so many lanes; all members together."""
        ...

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Send and receive everything at once; return when all has left and arrived.

        Messages between two ranks on one lane arrive in the order they were sent. The parcels
        of one call must not overlap in memory where one of them is a receive.
        """
        ...

    def hear(self, parcel: Parcel) -> None:
        """Receive from one peer, however long it is until that one speaks; on the host.

        A peer that is gone is noticed all the same. Several threads may hear different peers.
        """
        ...

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Begin the back end's own sum into ``tensor``; several may be in flight, in one order."""
        ...

    def watch(self, what: str, over: Callable[[], bool]) -> None:
        """Have somebody look after what the host does not wait for; only a GPU leaves such."""
        ...

    def close(self) -> None:
        """Leave the group; nothing may be in flight."""
        ...


@runtime_checkable
class SharesNatively(Protocol):
    """A channel whose back end reduces and gathers chunks itself, in place, chunk r being rank r's.

    All chunks are of one length; for tensors that the back end keeps itself. A lane takes one after
    another.
    """

    def start_reduce_scatter(self, tensor: Tensor, lane: int = 0) -> Pending:
        """Begin to make this rank's chunk of ``tensor`` the sum of all ranks'."""
        ...

    def start_all_gather(self, tensor: Tensor, lane: int = 0) -> Pending:
        """Begin to make every chunk of ``tensor`` that of its owner."""
        ...


class Finished:
    """The `Pending` of something that was done when it was returned."""

    def __init__(self, finished_s: float) -> None:
        self.finished_s: float | None = finished_s

    def wait(self) -> None:
        """Return at once."""
