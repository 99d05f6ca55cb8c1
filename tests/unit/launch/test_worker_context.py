"""Stop requests, and failures of a rank: what is reported, and which error a rank raises."""

import io
import signal
import threading
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from stretto.cluster.heartbeats import FailureReport, post_failure_report, read_failure_report
from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import thread_transports
from stretto.errors import STOPPED_EXIT_CODE, StrettoError, TransportError
from stretto.launch import worker_context
from stretto.launch.process_setup import block_stop_signals
from stretto.launch.worker_context import (
    StoppedError,
    WorkerContext,
    catch_stop_request,
    leave_world,
    make_control_plane,
    report_failures,
)

STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2]


@pytest.fixture(autouse=True)
def handlers():
    """Return the handlers of the stop signals, which are put back after the test."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number):
    """Send this thread a signal: another thread of the test's process would not block it."""
    signal.pthread_kill(threading.get_ident(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_before_the_first_step_is_raised_at_once(number, handlers):
    name = number.name.removeprefix("SIG")
    with (
        pytest.raises(StoppedError, match=f"stopped by {name} before the first step") as stopped,
        catch_stop_request(),
    ):
        send(number)
    assert stopped.value.exit_code == STOPPED_EXIT_CODE
    assert {n: signal.getsignal(n) for n in STOP_SIGNALS} == handlers


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_deferred_stop_is_kept_for_the_loop_and_the_first_signal_counts(number):
    with catch_stop_request() as request:
        request.defer()
        assert request.signal_name() is None
        send(number)
        send(signal.SIGTERM)
        assert request.signal_name() == number.name.removeprefix("SIG")


def test_the_handlers_of_before_are_back_afterwards(handlers):
    with catch_stop_request():
        assert all(signal.getsignal(n) != handlers[n] for n in STOP_SIGNALS)
    assert {n: signal.getsignal(n) for n in STOP_SIGNALS} == handlers


def test_a_closed_request_ignores_signals_to_the_end_of_the_process():
    with catch_stop_request() as request:
        request.defer()
        request.close()
        send(signal.SIGTERM)
    send(signal.SIGUSR1)
    assert request.signal_name() is None
    assert {signal.getsignal(n) for n in STOP_SIGNALS} == {signal.SIG_IGN}


def test_a_signal_that_was_blocked_arrives_once_there_are_handlers():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with block_stop_signals():
        send(signal.SIGUSR1)
        assert signal.SIGUSR1 in signal.sigpending()
        with pytest.raises(StoppedError, match="stopped by USR1"), catch_stop_request():
            pytest.fail("the signal did not arrive")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


@pytest.fixture
def store(monkeypatch):
    """Return the store that all ranks of the rendezvous have."""
    made = HashStore()
    monkeypatch.setattr(worker_context, "rendezvous", lambda _world: SimpleNamespace(store=made))
    return made


def context_of(rank, *, heartbeat=True):
    transport = thread_transports(2)[rank]
    beating = SimpleNamespace(step=0, stop=lambda: None) if heartbeat else None
    world = World(rank, Mesh((2,)), generation=1)
    return WorkerContext(world, transport, transport, io.StringIO(), beating)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(StrettoError("no room"), "no room"), (ValueError("odd"), "ValueError: odd")],
)
def test_a_rank_that_fails_reports_why_and_raises_its_own_error(failure, reason, store):
    with pytest.raises(type(failure)) as raised, report_failures(context_of(1)):
        raise failure
    assert raised.value is failure
    assert read_failure_report(store, 1) == FailureReport(1, reason, "failed")


def test_the_first_report_stays(store):
    for rank in (1, 0):
        with pytest.raises(ValueError, match="odd"), report_failures(context_of(rank)):
            raise ValueError(f"odd on {rank}")
    assert read_failure_report(store, 1) == FailureReport(1, "ValueError: odd on 1", "failed")


def test_a_rank_that_lost_a_peer_raises_what_failed_first(store):
    post_failure_report(store, 1, FailureReport(1, "no room", "failed"))
    lost = TransportError("rank 0 waits for rank 1")
    with pytest.raises(TransportError, match=r"rank 1.*no room") as raised:  # noqa: SIM117
        with report_failures(context_of(0)):
            raise lost
    assert raised.value.__cause__ is lost


def test_without_a_report_of_another_rank_a_lost_peer_is_the_error(store, monkeypatch):
    now = SimpleNamespace(s=0.0)

    def pass_time(seconds):
        now.s += seconds

    clock = SimpleNamespace(monotonic=lambda: now.s, sleep=pass_time)
    monkeypatch.setattr(worker_context, "time", clock)
    lost = TransportError("rank 0 waits for rank 1")
    with pytest.raises(TransportError) as raised, report_failures(context_of(0)):
        raise lost
    assert raised.value is lost
    assert 1 < now.s < 10  # it has waited for the report
    assert read_failure_report(store, 1) is None


def test_a_rank_whose_own_failure_is_reported_does_not_blame_itself(store):
    post_failure_report(store, 1, FailureReport(0, "silent for 30 s", "silent"))
    lost = TransportError("closed")
    with pytest.raises(TransportError) as raised, report_failures(context_of(0)):
        raise lost
    assert raised.value is lost


def test_a_world_of_one_rank_has_nobody_to_tell(monkeypatch):
    monkeypatch.setattr(worker_context, "rendezvous", lambda _world: pytest.fail("no store"))
    with pytest.raises(ValueError, match="odd"), report_failures(context_of(0, heartbeat=False)):
        raise ValueError("odd")


def test_the_heartbeat_has_the_step_that_begins():
    context = context_of(0)
    control = make_control_plane(context, SimpleNamespace(signal_name=lambda: "TERM"))
    control.on_step_begin(17)
    assert context.heartbeat.step == 17
    assert control.transport is context.control_transport
    assert control.stop_signal() == "TERM"


def test_log_lines_are_flushed_one_by_one():
    flushed = []

    class Stream(io.StringIO):
        def flush(self):
            flushed.append(self.getvalue())

    (transport,) = thread_transports(1)
    context = WorkerContext(World(0, Mesh((1,))), transport, transport, Stream())
    context.log_line("one")
    context.log_line("two")
    assert flushed == ["one\n", "one\ntwo\n"]
    leave_world(context)  # without a heartbeat
