"""A transport between processes over Gloo, with process groups of its own.

Groups and generations: the default group of torch.distributed is never used. A group is built on
the launcher's store under a prefix that names its *generation*. After a rank dies, the survivors
build the next generation on the same store with other members, and close the old one.

One connection for each lane: before a Gloo message moves, its receiver sends a "ready" message on
the same connection as its own data. Behind the bulk data of another lane, that message would wait
until all of it has left, and the two directions would run one after the other.

Threads end before the interpreter: after a sum, a Gloo thread releases its tensors, for which it
takes the GIL. A thread that asks for the GIL while the interpreter shuts down is killed inside a
destructor, which aborts the process ("terminate called without an active exception"). `close`
therefore drops the groups, which joins their threads. While a sum is still running, joining could
last until the time-out, so `close` then keeps the groups as long as the process lives. If it only
left them to their last owner, that would be the sum, which ends on a thread of its group: the
thread would join itself, which aborts the process ("Resource deadlock avoided").
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
)
from torch._C._distributed_c10d import Work as C10dWork

from stretto.cluster.world import Mesh
from stretto.comm.transport import P2POp, Work
from stretto.errors import TransportError
from stretto.telemetry.event_text import strip_unprintable
from stretto.units import format_s

_Gloo: Any = ProcessGroupGloo
"""Typed as Any: the stubs declare neither its options nor its collectives."""

_LIKELY_CAUSES = {
    r"[Tt]ime(d )?out": "it hangs, or its host is gone",
    r"[Cc]onnection|pipe": "it was killed, ran out of memory, or its host is gone",
}
"""Probable cause of a lost peer, by a pattern in the back end's message; the first match counts."""


_busy_groups: list[Any] = []
"""Groups that were closed while a sum was running; see the note on threads above."""

_NO_TIMEOUT = timedelta(days=365)
"""Gloo needs a number, even for a receive that may wait for ever."""


class GlooTransport:
    """This process's end of one generation of a group; created by `open_gloo`."""

    def __init__(
        self, open_lane: Callable[[int], ProcessGroupGloo], members: Sequence[int], mesh: Mesh
    ) -> None:
        self._open_lane = open_lane
        self._lanes: list[Any] = []
        self._members = tuple(members)
        self._mesh = mesh
        self._in_flight: set[_GlooWork] = set()
        self.reserve(1)
        self._rank = int(self._lanes[0].rank())

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self._members)

    @property
    def mesh(self) -> Mesh:
        """The hosts of the group and the ranks on each."""
        return self._mesh

    def reserve(self, lanes: int) -> None:
        """Connect the lanes below ``lanes`` that are not open yet; all ranks call this together."""
        while len(self._lanes) < lanes:
            self._lanes.append(self._open_lane(len(self._lanes)))

    def exchange(self, sends: Sequence[P2POp], receives: Sequence[P2POp]) -> None:
        """Post every receive, then every send, then wait for all."""
        works: list[tuple[int, C10dWork]] = []
        peer = -1  # the peer of the call that failed, for the error message
        try:
            for peer, tensor, lane in receives:
                works.append((peer, self._lanes[lane].recv([tensor], peer, 0)))
            for peer, tensor, lane in sends:
                works.append((peer, self._lanes[lane].send([tensor], peer, 0)))
            for peer, work in works:  # noqa: B007 - named in the error below
                work.wait()
        except RuntimeError as failure:
            raise TransportError(self._describe(peer, failure)) from failure

    def receive(self, p2p_op: P2POp) -> None:
        """Receive without a time-out; a broken connection raises `TransportError`."""
        peer, tensor, lane = p2p_op
        try:
            self._lanes[lane].recv([tensor], peer, 0).wait(_NO_TIMEOUT)
        except RuntimeError as failure:
            raise TransportError(self._describe(peer, failure)) from failure

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """Start Gloo's own all-reduce, a sum into ``tensor``."""
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.SUM)
        try:
            return _GlooWork(self._lanes[0].allreduce([tensor], options), self)
        except RuntimeError as failure:
            raise TransportError(self._describe(-1, failure)) from failure

    def watch_for_timeout(self, description: str, is_completed: Callable[[], bool]) -> None:
        """Do nothing: with Gloo the host waits for everything, and gets the error itself."""

    def close(self) -> None:
        """Leave the group; a peer that still waits for this rank waits until its time-out."""
        for group in self._lanes:
            group.shutdown()
        if self._in_flight:
            _busy_groups.extend(self._lanes)
        else:
            self._lanes.clear()

    def _describe(self, peer: int, failure: RuntimeError) -> str:
        peer_name = "a peer" if peer < 0 else f"rank {self._members[peer]}"
        reason = clean_backend_message(str(failure))
        causes = (
            f"; {cause}" for pattern, cause in _LIKELY_CAUSES.items() if re.search(pattern, reason)
        )
        return f"rank {self._members[self.rank]} lost {peer_name}: {reason}{next(causes, '')}"


class _GlooWork:
    """A running all-reduce of Gloo; records when it finished, for the timeline."""

    def __init__(self, work: C10dWork, transport: GlooTransport) -> None:
        self._work = work
        self._transport = transport
        self.finished_s: float | None = None
        transport._in_flight.add(self)
        work.get_future().add_done_callback(self._on_completed)

    def wait(self) -> None:
        """Return when the tensor holds the sum."""
        try:
            self._work.wait()
        except RuntimeError as failure:
            raise TransportError(self._transport._describe(-1, failure)) from failure

    def _on_completed(self, _future: object) -> None:
        self.finished_s = time.monotonic()
        self._transport._in_flight.discard(self)


def open_gloo(
    store: Store,
    *,
    rank: int,
    members: Sequence[int] | Mesh,
    generation: int = 0,
    interface: str | None = None,
    timeout_s: float = 300.0,
) -> GlooTransport:
    """Build one generation of a group over Gloo; every member calls this with equal arguments.

    Args:
        store: The store over which members find each other; it must outlive the group.
        rank: This process's rank in the world. Its rank in the group is its index in ``members``.
        members: World ranks of the group, in order, all on one host; or the mesh of the world.
        generation: Number of the rebuild. A late member of an older generation finds no peers.
        interface: Network interface to listen on; loopback when None.
        timeout_s: Seconds that a peer may be silent before it counts as lost.

    Raises:
        TransportError: The group cannot be joined.
    """
    mesh = members if isinstance(members, Mesh) else Mesh((len(members),))
    ranks = range(mesh.size) if isinstance(members, Mesh) else members
    prefix = PrefixStore(f"transport/{generation}", store)
    group_rank, devices = ranks.index(rank), list[Any]()

    def open_lane(lane: int) -> ProcessGroupGloo:
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        # Two threads: a second sum keeps the wire busy while the first ends. Four were no faster.
        options._threads = 2 if lane == 0 else 1
        try:
            if not devices:
                with _batch_scheduled_threads():
                    devices.append(_Gloo.create_device(interface=interface or "lo"))
            options._devices = devices
            group: ProcessGroupGloo = _Gloo(
                PrefixStore(f"lane/{lane}", prefix), group_rank, mesh.size, options
            )
        except RuntimeError as failure:
            raise TransportError(
                f"rank {rank} could not join generation {generation} of {mesh.size} ranks "
                f"on interface {interface or 'lo'}: {clean_backend_message(str(failure))}"
            ) from failure
        return group

    return GlooTransport(open_lane, ranks, mesh)


@contextmanager
def _batch_scheduled_threads() -> Iterator[None]:
    """Give threads started inside the Linux policy SCHED_BATCH, so that they preempt nobody.

    Gloo's I/O thread spins on the lock of a connection instead of sleeping. If it wakes up in the
    middle of a send, on the core of the thread that holds the lock, it takes that core. It then
    spins for its whole time slice: milliseconds, for a message of microseconds.
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


def clean_backend_message(text: str) -> str:
    """Return a back end's error message as one line of ASCII, without source files and advice."""
    line = strip_unprintable(next(iter(text.splitlines()), "")).encode("ascii", "ignore").decode()
    line = re.sub(r"\[[^\]\s]*\.[a-z]+:\d+\] *", "", line).partition("This is typically")[0]
    line = re.sub(r"\[([\d.]+)\](?=:\d)", r"\1", line)  # brackets are for IPv6
    line = re.sub(r"Timed out waiting (\d+)ms.*", _timeout_text, line).strip(" .")
    return line[:1].lower() + line[1:] or "the back end gave no reason"


def _timeout_text(found: re.Match[str]) -> str:
    return f"timed out after {format_s(int(found[1]) / 1e3)}"
