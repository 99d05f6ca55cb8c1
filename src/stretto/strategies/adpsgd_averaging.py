"""Pairwise averaging of AD-PSGD: active ranks start averages, passive ranks answer at any time.

::

    active                                        passive
    average  start signal          ------------>  receives it
             model                 <----------->  model, both at once
             moves half way                       moves half way
             receives it           <------------  done signal: the average is over for both
    drain    stop signal           ------------>  once all active ranks have sent it, no average is
                                                  in flight

The active rank of a pair always sends first, so all messages share one lane without deadlock.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from stretto.comm.transport import P2POp, Transport
from stretto.optim.rules import half_difference
from stretto.topology.adpsgd_pairs import OperationKind, active_ranks, is_active, passive_ranks

PAIR_LANE = 1
"""Lane of all pair messages; collectives use lane 0."""
_START, _STOP, _DONE = 1.0, 0.0, 2.0

PeerOfStep = Callable[[int], int | None]
"""Returns the peer that an active rank averages with after a step, or None."""
OperationGate = Callable[[OperationKind], AbstractContextManager[object]]
"""Returns a context in which an operation runs; tests use it to force an order."""


class SharedParameters:
    """The live model that peers average with: one flat tensor per type, changed under `lock`.

    Forward and backward need parameters that do not change, so the live model is a second copy. The
    parameters are copied from it before each step. An update therefore applies a gradient of older
    values to the live ones.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.lock = threading.Lock()
        self._groups: list[list[Tensor]] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            self._groups.append([p.detach() for p in parameters if p.dtype == dtype])
        self._flats = self.new_buffers()
        self._views = [
            [part.view(p.shape) for part, p in zip(flat.split(sizes), group, strict=True)]
            for flat, group in zip(self._flats, self._groups, strict=True)
            for sizes in [[p.numel() for p in group]]
        ]

    def new_buffers(self) -> list[Tensor]:
        """Return empty flat tensors of the same sizes, as message buffers."""
        return [
            torch.empty(sum(p.numel() for p in group), dtype=group[0].dtype)
            for group in self._groups
        ]

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        """Copy the live model to the parameters; the caller holds the lock."""
        for group, views in zip(self._groups, self._views, strict=True):
            torch._foreach_copy_(group, views)

    @torch.no_grad()
    def copy_from_parameters(self) -> None:
        """Copy the parameters to the live model; the caller holds the lock."""
        for group, views in zip(self._groups, self._views, strict=True):
            torch._foreach_copy_(views, group)

    @torch.no_grad()
    def copy_into(self, sent: Sequence[Tensor]) -> None:
        """Copy the live model to the buffers ``sent``."""
        with self.lock:
            torch._foreach_copy_(list(sent), self._flats)

    @torch.no_grad()
    def average_with(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Add half the difference between received and sent values; see `half_difference`.

        The live values may have changed since they were sent; that change is kept.
        """
        with self.lock:
            for flat, sent_values, received_values in zip(self._flats, sent, received, strict=True):
                flat += half_difference(sent_values, received_values)


class PairAverager(Protocol):
    """Averages the live model with peers, on background threads."""

    def open(self) -> None:
        """Allow averages from now on; the live model is up to date."""
        ...

    def start_average(self, step: int) -> None:
        """Start the average after ``step``, once the one before has ended; raise its failure."""
        ...

    def drain(self) -> None:
        """Return when no average is in flight; none starts until `open` (collective)."""
        ...

    def close(self) -> None:
        """End the threads without waiting for peers."""
        ...


def make_pair_averager(
    transport: Transport,
    shared: SharedParameters,
    peer_of: PeerOfStep,
    operation_gate: OperationGate,
) -> PairAverager:
    """Return the active or passive averager of this rank."""
    if is_active(transport.rank):
        return ActiveAverager(transport, shared, peer_of, operation_gate)
    return PassiveAverager(transport, shared)


class ActiveAverager:
    """Starts averages with one peer after another, on a background thread."""

    def __init__(
        self,
        transport: Transport,
        shared: SharedParameters,
        peer_of: PeerOfStep,
        operation_gate: OperationGate,
    ) -> None:
        self._transport, self._shared = transport, shared
        self._peer_of, self._operation_gate = peer_of, operation_gate
        self._sent, self._received = shared.new_buffers(), shared.new_buffers()
        self._in_flight = _completed_future()
        self._worker = _BackgroundThread("pair-averages")

    def open(self) -> None:
        """Do nothing: only `start_average` starts an average on this side."""

    def start_average(self, step: int) -> None:
        """Wait for the average before; start one on the thread if the step has a peer."""
        self._in_flight.result()
        peer = self._peer_of(step)
        if peer is not None:
            self._in_flight = self._worker.submit(partial(self._average_with, peer))

    def drain(self) -> None:
        """Wait for the average in flight and send a stop signal to all passive ranks."""
        self._in_flight.result()
        signal = torch.tensor([_STOP])
        passive = passive_ranks(self._transport.size)
        self._transport.exchange([P2POp(peer, signal, PAIR_LANE) for peer in passive], [])

    def close(self) -> None:
        """End the thread."""
        self._worker.close(wait=self._in_flight.done())

    def _average_with(self, peer: int) -> None:
        with self._operation_gate(OperationKind.AVERAGE):
            self._shared.copy_into(self._sent)
            sends = [torch.tensor([_START]), *self._sent]
            self._transport.exchange(_p2p_ops(peer, sends), _p2p_ops(peer, self._received))
            self._shared.average_with(self._sent, self._received)
            self._transport.exchange([], [P2POp(peer, torch.empty(1), PAIR_LANE)])


class PassiveAverager:
    """Answers active ranks; one thread listens to each of them."""

    def __init__(self, transport: Transport, shared: SharedParameters) -> None:
        self._transport, self._shared = transport, shared
        self._sent, self._received = shared.new_buffers(), shared.new_buffers()
        self._answer_lock = threading.Lock()
        active = active_ranks(transport.size)
        self._listeners = {peer: _BackgroundThread(f"pair-listener-{peer}") for peer in active}
        self._stopped = {peer: _completed_future() for peer in active}

    def open(self) -> None:
        """Start to listen to all active ranks."""
        for peer, listener in self._listeners.items():
            self._stopped[peer] = listener.submit(partial(self._serve_peer, peer))

    def start_average(self, step: int) -> None:
        """Start nothing; raise the failure of a listener, if one has failed."""
        for listening in self._stopped.values():
            if listening.done():
                listening.result()

    def drain(self) -> None:
        """Answer until all active ranks have sent a stop signal."""
        for listening in self._stopped.values():
            listening.result()

    def close(self) -> None:
        """End the threads."""
        for peer, listener in self._listeners.items():
            listener.close(wait=self._stopped[peer].done())

    def _serve_peer(self, peer: int) -> None:
        signal = torch.empty(1)
        while True:
            self._transport.receive(P2POp(peer, signal, PAIR_LANE))
            if float(signal) == _STOP:
                return
            self._answer(peer)

    def _answer(self, peer: int) -> None:
        with self._answer_lock:  # all answers share one pair of buffers
            self._shared.copy_into(self._sent)
            self._transport.exchange(_p2p_ops(peer, self._sent), _p2p_ops(peer, self._received))
            self._shared.average_with(self._sent, self._received)
            self._transport.exchange([P2POp(peer, torch.tensor([_DONE]), PAIR_LANE)], [])


class _BackgroundThread:
    """A thread that runs tasks in order; a failure is raised by the task's future."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], None]) -> "Future[None]":
        """Queue ``task`` and return its future at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        done = Future[None]()
        self._jobs.put((task, done))
        return done

    def close(self, *, wait: bool) -> None:
        """End the thread; without ``wait``, a thread blocked on a peer ends with the process."""
        self._jobs.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            task, done = entry
            try:
                task()
            except BaseException as failure:  # noqa: BLE001 - raised where it is waited for
                done.set_exception(failure)
            else:
                done.set_result(None)


def _completed_future() -> "Future[None]":
    done = Future[None]()
    done.set_result(None)
    return done


def _p2p_ops(peer: int, tensors: Sequence[Tensor]) -> list[P2POp]:
    return [P2POp(peer, tensor, PAIR_LANE) for tensor in tensors]
