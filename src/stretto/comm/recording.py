"""A channel that writes down every message before it passes it on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from stretto.cluster.world import Mesh
from stretto.comm.channel import Channel, Parcel, Pending


@dataclass(frozen=True, slots=True)
class Message:
    """What a rank sent: to one peer, or (``peer`` -1) into the back end's own all-reduce."""

    peer: int
    num_bytes: int
    lane: int = 0


class RecordingChannel:
    """Wraps any channel; `sent` is what this rank handed over, in order."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self.sent: list[Message] = []

    @property
    def rank(self) -> int:
        """My place in the group."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """Number of members."""
        return self._inner.size

    @property
    def mesh(self) -> Mesh:
        """Which members share a host."""
        return self._inner.mesh

    def reserve(self, lanes: int) -> None:
        """Let the inner channel make ready."""
        self._inner.reserve(lanes)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Note the sends, then exchange."""
        self.sent.extend(Message(peer, tensor.nbytes, lane) for peer, tensor, lane in sends)
        self._inner.exchange(sends, receives)

    def hear(self, parcel: Parcel) -> None:
        """Hear: nothing is sent."""
        self._inner.hear(parcel)

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Note the tensor, then begin the sum."""
        self.sent.append(Message(-1, tensor.nbytes))
        return self._inner.start_all_reduce(tensor)

    def watch(self, what: str, over: Callable[[], bool]) -> None:
        """Let the inner channel look after it."""
        self._inner.watch(what, over)

    def close(self) -> None:
        """Close the inner channel."""
        self._inner.close()
