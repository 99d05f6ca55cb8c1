"""A rank's connections to the others: transports, heartbeat, stop requests and failure reports.

A stop is requested by TERM, INT, USR1 or USR2, and takes effect at the end of a step. Slurm sends
TERM when it preempts a job, and the signal of ``--signal`` before a time limit. torchrun forwards
TERM, mpirun forwards USR1 and USR2, and a person presses Ctrl-C.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TextIO

from torch._C._distributed_c10d import Store

from stretto.cluster.heartbeats import (
    FailureReport,
    Heartbeat,
    post_failure_report,
    read_failure_report,
)
from stretto.cluster.rendezvous import rendezvous
from stretto.cluster.store import connect_store
from stretto.cluster.world import World
from stretto.comm.connect import connect
from stretto.comm.transport import Transport, barrier
from stretto.errors import STOPPED_EXIT_CODE, StrettoError, TransportError
from stretto.launch.process_setup import unblock_stop_signals
from stretto.launch.worker_output import secondary_failure_text
from stretto.run import RunSection
from stretto.train.step_consensus import STOP_SIGNAL_NAMES, ControlPlane


class StoppedError(StrettoError):
    """A stop was requested before there was a step to finish."""

    exit_code = STOPPED_EXIT_CODE


class StopRequest:
    """The first stop request to this process; made by `catch_stop_request`."""

    def __init__(self) -> None:
        self._signal_name: str | None = None
        self._deferred = False
        self.closed = False

    def signal_name(self) -> str | None:
        """Return the name of the stop signal, as ``TERM``; None if there was none."""
        return self._signal_name

    def defer(self) -> None:
        """From now on store requests for the training loop; before, a request raises at once."""
        self._deferred = True

    def close(self) -> None:
        """Ignore stop signals until the end of the process.

        Everything is saved, and a launcher that sees the first rank leave may signal the others.
        """
        for number in _stop_signals():
            signal.signal(number, signal.SIG_IGN)
        self.closed = True

    def on_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Signal handler: store the request, or raise `StoppedError` before `defer`."""
        self._signal_name = self._signal_name or signal.Signals(signum).name.removeprefix("SIG")
        if not self._deferred:
            raise StoppedError(
                f"stopped by {self._signal_name} before the first step; nothing is lost"
            )


@contextmanager
def catch_stop_request() -> Iterator[StopRequest]:
    """Turn the stop signals into a `StopRequest` while the context lasts."""
    request = StopRequest()
    before = {number: signal.signal(number, request.on_signal) for number in _stop_signals()}
    try:
        unblock_stop_signals()
        yield request
    finally:
        if not request.closed:
            for number, handler in before.items():
                signal.signal(number, handler)


def _stop_signals() -> list[signal.Signals]:
    return [signal.Signals[f"SIG{signal_name}"] for signal_name in STOP_SIGNAL_NAMES]


_FAILURE_REPORT_TIMEOUT_S = 2.0
"""Seconds that a rank which lost a peer waits for the report of the rank that failed first."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A rank's world, transports and heartbeat, available once it has joined the other ranks."""

    world: World
    transport: Transport
    control_transport: Transport
    """For step consensus and barriers, separate from the strategy's messages."""
    stream: TextIO
    """Where this rank writes its log lines."""
    heartbeat: Heartbeat | None = None
    """None in a world of one rank."""

    def log_line(self, line: str) -> None:
        """Write a line and flush it, because buffered lines are lost if this process is killed."""
        self.stream.write(f"{line}\n")
        self.stream.flush()


def join_world(stack: ExitStack, run: RunSection, world: World, stream: TextIO) -> WorkerContext:
    """Connect to the other ranks and start the heartbeat."""
    transport = connect(world, run.timeout_s)
    stack.callback(transport.close)
    if world.store_address is None:
        return WorkerContext(world, transport, transport, stream)
    control_transport = connect(world, run.timeout_s, name="control")
    stack.callback(control_transport.close)
    rendezvous_result = rendezvous(world)
    assert rendezvous_result.world.store_address is not None
    heartbeat_store = connect_store(
        rendezvous_result.world.store_address, world.rank, run.timeout_s
    )
    context = WorkerContext(rendezvous_result.world, transport, control_transport, stream)
    heartbeat = Heartbeat(
        heartbeat_store, rendezvous_result.world, run.heartbeat_timeout_s, context.log_line
    )
    barrier(control_transport)
    heartbeat.start()
    stack.callback(heartbeat.stop)
    return replace(context, heartbeat=heartbeat)


def make_control_plane(context: WorkerContext, request: StopRequest) -> ControlPlane:
    """Return the control plane for step consensus: its transport, stop requests, heartbeat step."""

    def on_step_begin(step: int) -> None:
        if context.heartbeat:
            context.heartbeat.step = step

    return ControlPlane(context.control_transport, request.signal_name, on_step_begin)


def leave_world(context: WorkerContext) -> None:
    """Wait until every rank has come this far, then stop the heartbeat."""
    barrier(context.control_transport)
    if context.heartbeat:
        context.heartbeat.stop()


@contextmanager
def report_failures(context: WorkerContext) -> Iterator[None]:
    """Report an exception to the store; if a peer failed first, raise an error that names it."""
    try:
        yield
    except Exception as failure:
        if (root_failure := _root_failure(failure, context)) is not failure:
            raise root_failure from failure
        raise


def _root_failure(failure: Exception, context: WorkerContext) -> Exception:
    """Return the exception to raise; after a lost peer, wait for the first failure's report."""
    if context.heartbeat is None:
        return failure
    store, generation, rank = (
        rendezvous(context.world).store,
        context.world.generation,
        context.world.rank,
    )
    try:
        if not isinstance(failure, TransportError):
            kind = "" if isinstance(failure, StrettoError) else f"{type(failure).__name__}: "
            post_failure_report(
                store, generation, FailureReport(rank, f"{kind}{failure}", "failed")
            )
            return failure
        failure_report = _await_failure_report(store, generation)
    except RuntimeError:  # the store is gone with the launcher, so nothing can be reported
        return failure
    if failure_report is None or failure_report.rank == rank:
        return failure
    return TransportError(secondary_failure_text(failure_report.rank, failure_report.reason))


def _await_failure_report(store: Store, generation: int) -> FailureReport | None:
    deadline_s = time.monotonic() + _FAILURE_REPORT_TIMEOUT_S
    while (
        failure_report := read_failure_report(store, generation)
    ) is None and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return failure_report
