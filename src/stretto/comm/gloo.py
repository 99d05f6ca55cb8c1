"""Ranks as processes: a channel over a torch.distributed process group of its own.

Note: groups and generations. The default group of torch.distributed is never used. A group is
built on the launcher's store under a prefix that names its *generation*; after a death the
survivors build the next generation on the same store, with other members, and close the old one.

Note: a lane is a connection of its own. Before a message moves, its receiver sends a word that it
is ready, down the same connection as what the receiver itself sends: behind another lane's bulk
that word would wait until all of it has left, and two directions would take turns.

Note: a group's threads end before the interpreter does. A thread of Gloo's that has made a sum lets
go of its tensors, which belong to Python as well, so it asks for the interpreter's lock. Whoever
asks while the interpreter ends is ended on the spot, inside a destructor, and takes the whole
process along ("terminate called without an active exception"). So a channel that is closed drops
its groups, which joins their threads; except where a sum is still under way, and might stay so
until its time-out.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
    Work,
)

from stretto.cluster.world import Mesh
from stretto.comm.channel import Parcel, Pending
from stretto.errors import ChannelError
from stretto.telemetry.wording import printable
from stretto.units import format_s

_Gloo: Any = ProcessGroupGloo
"""Untyped here: the stubs know neither its options nor its collectives."""

_CAUSES = {
    r"[Tt]ime(d )?out": "it hangs, or its host is gone",
    r"[Cc]onnection|pipe": "it was killed, ran out of memory, or its host is gone",
}
"""What a lost peer has probably met, by what the back end says of it; the first that fits."""


_PATIENCE = timedelta(days=365)
"""For a peer that has nothing to say; Gloo wants a number."""


class GlooChannel:
    """This process's end of one generation of a group; made by `open_channel`."""

    def __init__(
        self, open_lane: Callable[[int], ProcessGroupGloo], members: Sequence[int], mesh: Mesh
    ) -> None:
        self._open_lane = open_lane
        self._lanes: list[Any] = []
        self._members = tuple(members)
        self._mesh = mesh
        self._under_way: set[_Work] = set()
        self.reserve(1)
        self._rank = int(self._lanes[0].rank())

    @property
    def rank(self) -> int:
        """My place in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self._members)

    @property
    def mesh(self) -> Mesh:
        """Which members share a host."""
        return self._mesh

    def reserve(self, lanes: int) -> None:
        """Connect as many lanes as there are not yet; every member calls this together."""
        while len(self._lanes) < lanes:
            self._lanes.append(self._open_lane(len(self._lanes)))

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Post every receive, then every send, then wait for all."""
        works: list[tuple[int, Work]] = []
        peer = -1  # whoever the failing call was about
        try:
            for peer, tensor, lane in receives:
                works.append((peer, self._lanes[lane].recv([tensor], peer, 0)))
            for peer, tensor, lane in sends:
                works.append((peer, self._lanes[lane].send([tensor], peer, 0)))
            for peer, work in works:  # noqa: B007 - named in the error below
                work.wait()
        except RuntimeError as failure:
            raise ChannelError(self._describe(peer, failure)) from failure

    def hear(self, parcel: Parcel) -> None:
        """Receive, beyond the group's time-out; a connection that breaks ends it."""
        peer, tensor, lane = parcel
        try:
            self._lanes[lane].recv([tensor], peer, 0).wait(_PATIENCE)
        except RuntimeError as failure:
            raise ChannelError(self._describe(peer, failure)) from failure

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Begin the back end's own sum."""
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.SUM)
        try:
            return _Work(self._lanes[0].allreduce([tensor], options), self)
        except RuntimeError as failure:
            raise ChannelError(self._describe(-1, failure)) from failure

    def watch(self, what: str, over: Callable[[], bool]) -> None:
        """Do nothing: whoever waits here is told."""

    def close(self) -> None:
        """Leave the group; a peer that still waits for us waits until its time-out."""
        for group in self._lanes:
            group.shutdown()
        if not self._under_way:
            self._lanes.clear()

    def _describe(self, peer: int, failure: RuntimeError) -> str:
        who = "a peer" if peer < 0 else f"rank {self._members[peer]}"
        reason = in_plain_words(str(failure))
        causes = (f"; {cause}" for said, cause in _CAUSES.items() if re.search(said, reason))
        return f"rank {self._members[self.rank]} lost {who}: {reason}{next(causes, '')}"


class _Work:
    """A native collective in flight; remembers when it was done, for the time-line."""

    def __init__(self, work: Work, channel: GlooChannel) -> None:
        self._work = work
        self._channel = channel
        self.finished_s: float | None = None
        channel._under_way.add(self)
        work.get_future().add_done_callback(self._finished)

    def wait(self) -> None:
        """Return when the sum is there."""
        try:
            self._work.wait()
        except RuntimeError as failure:
            raise ChannelError(self._channel._describe(-1, failure)) from failure

    def _finished(self, _future: object) -> None:
        self.finished_s = time.monotonic()
        self._channel._under_way.discard(self)


def open_channel(
    store: Store,
    *,
    rank: int,
    members: Sequence[int] | Mesh,
    generation: int = 0,
    interface: str | None = None,
    timeout_s: float = 300.0,
) -> GlooChannel:
    """Build one generation of a group over Gloo; every member calls this with equal arguments.

    Args:
        store: Where members meet; it outlives the group.
        rank: My rank in the world; my rank in the group is its place among ``members``.
        members: World ranks of the group, in order, all on one host; or the mesh of the world.
        generation: Grows with each rebuild, so that a late member of an old one meets nobody.
        interface: Network interface to listen on; loopback when None.
        timeout_s: How long a peer may be silent before it counts as lost.
    """
    mesh = members if isinstance(members, Mesh) else Mesh((len(members),))
    ranks = range(mesh.size) if isinstance(members, Mesh) else members
    prefix = PrefixStore(f"channel/{generation}", store)
    me, devices = ranks.index(rank), list[Any]()

    def open_lane(lane: int) -> ProcessGroupGloo:
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        # Two sums in flight keep the wire busy while the first one ends; four measured no better.
        options._threads = 2 if lane == 0 else 1
        try:
            if not devices:
                with _patient_threads():
                    devices.append(_Gloo.create_device(interface=interface or "lo"))
            options._devices = devices
            group: ProcessGroupGloo = _Gloo(
                PrefixStore(f"lane/{lane}", prefix), me, mesh.size, options
            )
        except RuntimeError as failure:
            raise ChannelError(
                f"rank {rank} could not join generation {generation} of {mesh.size} ranks "
                f"on interface {interface or 'lo'}: {in_plain_words(str(failure))}"
            ) from failure
        return group

    return GlooChannel(open_lane, ranks, mesh)


@contextmanager
def _patient_threads() -> Iterator[None]:
    """Let threads that are started inside wait until a core is free, instead of taking it.

    Gloo's I/O thread does not wait for the lock of a connection, it asks again and again. Where it
    shares a core with the thread that holds the lock, waking up in the middle of a send takes the
    core from that thread and burns its own time slice, milliseconds, on a message of microseconds.
    """
    if not hasattr(os, "SCHED_BATCH"):  # only Linux has it
        yield
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def in_plain_words(text: str) -> str:
    """Return what a text of Gloo's tells, as one line of ASCII: no source files, no good wishes."""
    line = printable(next(iter(text.splitlines()), "")).encode("ascii", "ignore").decode()
    line = re.sub(r"\[[^\]\s]*\.[a-z]+:\d+\] *", "", line).partition("This is typically")[0]
    line = re.sub(r"\[([\d.]+)\](?=:\d)", r"\1", line)  # brackets are for IPv6
    line = re.sub(r"Timed out waiting (\d+)ms.*", _timed_out, line).strip(" .")
    return line[:1].lower() + line[1:] or "the back end gave no reason"


def _timed_out(found: re.Match[str]) -> str:
    return f"timed out after {format_s(int(found[1]) / 1e3)}"
