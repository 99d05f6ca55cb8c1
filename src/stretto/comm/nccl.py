"""A transport between processes with one GPU each, over NCCL, with a watchdog for stuck GPUs.

Each lane has its own communicator, which all ranks open together before its first message
(`reserve`). All messages of a round are one coalesced call. No call waits on the host: it is queued
on the current stream, in order with everything else there. CPU tensors travel over Gloo.
"""

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    Backend,
    PrefixStore,
    ReduceOp,
    ReduceScatterOptions,
    Store,
)
from torch._C._distributed_c10d import Work as C10dWork

from stretto.cluster.world import Mesh
from stretto.comm.gloo import clean_backend_message
from stretto.comm.transport import P2POp, Transport, Work
from stretto.errors import ConfigError, TransportError
from stretto.units import format_s

_POLL_INTERVAL_S = 0.2


def exit_process(reason: str) -> None:
    """Print ``reason`` and exit at once: threads that wait for the GPU cannot be interrupted."""
    sys.stderr.write(f"stretto: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


class GpuTimeoutWatchdog:
    """Ends the process when GPU work does not finish in time.

    A GPU that waits for a dead peer would wait for ever, and the host with it. A daemon thread
    polls the oldest work every 0.2 s. ``on_timeout`` is called there, once, with an error message.
    """

    def __init__(
        self, rank: int, timeout_s: float, on_timeout: Callable[[str], None] = exit_process
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._watched: deque[tuple[str, float, Callable[[], bool]]] = deque()
        self._has_fired = False
        self.is_gpu_stuck = False
        """Whether the queued work will never finish, so that nothing may wait for it."""
        self._lock = threading.Lock()
        atexit.register(self._at_exit)
        threading.Thread(target=self._poll_loop, name="gpu-timeout-watchdog", daemon=True).start()

    def watch_for_timeout(self, description: str, is_completed: Callable[[], bool]) -> None:
        """Start the time-out of the work called ``description``; ``is_completed`` ends it."""
        self._watched.append((description, time.monotonic(), is_completed))

    def _poll_loop(self) -> None:
        while not self._has_fired:
            time.sleep(_POLL_INTERVAL_S)
            failure_text = self._find_failure()
            if failure_text:
                self._has_fired = True
                self._on_timeout(failure_text)

    def _find_failure(self) -> str:
        """Drop finished work; return an error message if the oldest of the rest failed, else ""."""
        with self._lock:  # `_at_exit` calls this on the main thread
            return self._check_oldest()

    def _check_oldest(self) -> str:
        while self._watched:
            description, since_s, is_completed = self._watched[0]
            try:
                has_ended = is_completed()
            except RuntimeError as failure:  # the GPU is lost, with all the work queued on it
                reason_line = next(iter(str(failure).splitlines()), "no reason given")
                return f"rank {self._rank}: {description} failed on the GPU: {reason_line}"
            if not has_ended:
                is_late = time.monotonic() - since_s > self._timeout_s
                return (
                    f"rank {self._rank}: {description} has not finished after "
                    f"{format_s(self._timeout_s)}: a peer hangs, was killed, or does not take part"
                    if is_late
                    else ""
                )
            self._watched.popleft()
        return ""

    def _at_exit(self) -> None:
        """Name the stuck work if a GPU error ended the main thread before the watchdog saw it."""
        failure_text = "" if self._has_fired else self._find_failure()
        if failure_text:
            sys.stderr.write(f"stretto: {failure_text}\n")
        if self.is_gpu_stuck:
            # A normal exit would close NCCL's communicators, which wait for the GPU for ever.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


_ALL_REDUCE_LABEL = "NCCL's own sum"
_NCCL_TIMEOUT_FACTOR = 3
"""NCCL's own time-out, in multiples of ours: ours fires first, and names the collective."""


class NcclTransport:
    """This process's end of a group of GPUs; created by `open_nccl`."""

    def __init__(
        self,
        cpu_transport: Transport,
        open_lane: Callable[[int], Backend],
        watchdog: GpuTimeoutWatchdog,
    ) -> None:
        self._cpu_transport = cpu_transport
        self._open_lane = open_lane
        self._watchdog = watchdog
        self._lanes: list[Any] = []
        # Created once: for a small message, creating the options would take a part of its time.
        self._all_reduce_options = AllreduceOptions()
        self._all_reduce_options.reduceOp = ReduceOp(ReduceOp.SUM)
        self._reduce_scatter_options = ReduceScatterOptions()
        self._reduce_scatter_options.reduceOp = ReduceOp(ReduceOp.SUM)
        self._all_gather_options = AllgatherOptions()
        self.reserve(1)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._cpu_transport.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._cpu_transport.size

    @property
    def mesh(self) -> Mesh:
        """The hosts of the group and the ranks on each."""
        return self._cpu_transport.mesh

    def reserve(self, lanes: int) -> None:
        """Open the communicators of lanes below ``lanes``; all ranks call this together."""
        while len(self._lanes) < lanes:
            self._lanes.append(self._open_lane(len(self._lanes)))

    def exchange(self, sends: Sequence[P2POp], receives: Sequence[P2POp]) -> None:
        """Queue all messages as one call on the current stream; all must be on one lane."""
        p2p_ops = [*sends, *receives]
        if not p2p_ops:
            return
        if not p2p_ops[0].tensor.is_cuda:
            self._cpu_transport.exchange(sends, receives)
            return
        group = self._lanes[p2p_ops[0].lane]
        try:
            group._start_coalescing()
            for peer, tensor, _ in receives:
                group.recv([tensor], peer, 0)
            for peer, tensor, _ in sends:
                group.send([tensor], peer, 0)
            group._end_coalescing().wait()
        except RuntimeError as failure:
            raise self._to_transport_error(failure) from failure

    def receive(self, p2p_op: P2POp) -> None:
        """Receive over Gloo: a GPU must not be blocked for an unknown time."""
        self._cpu_transport.receive(p2p_op)

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """Start NCCL's own all-reduce, a sum into ``tensor``."""
        if not tensor.is_cuda:
            return self._cpu_transport.start_all_reduce(tensor)
        try:
            work = self._lanes[0].allreduce([tensor], self._all_reduce_options)
        except RuntimeError as failure:
            raise self._to_transport_error(failure) from failure
        self.watch_for_timeout(_ALL_REDUCE_LABEL, work.is_completed)
        return _NcclWork(work, self._to_transport_error)

    def start_reduce_scatter(self, tensor: Tensor, lane: int = 0) -> Work:
        """Start NCCL's own reduce-scatter: this rank's chunk of ``tensor`` becomes the sum."""
        local_chunk = self._chunk(tensor)
        return self._start(
            "reduce_scatter", lane, local_chunk, tensor, self._reduce_scatter_options
        )

    def start_all_gather(self, tensor: Tensor, lane: int = 0) -> Work:
        """Start NCCL's own all-gather: every chunk of ``tensor`` becomes its owner's."""
        local_chunk = self._chunk(tensor)
        return self._start("allgather", lane, tensor, local_chunk, self._all_gather_options)

    def _chunk(self, tensor: Tensor) -> Tensor:
        length = tensor.numel() // self.size
        return tensor[self.rank * length : (self.rank + 1) * length]

    def _start(self, name: str, lane: int, output: Tensor, source: Tensor, options: object) -> Work:
        group = self._lanes[lane]
        call = getattr(group, f"_{name}_base", None) or getattr(group, f"{name}_single")
        try:
            work = call(output, source, options)
        except RuntimeError as failure:
            raise self._to_transport_error(failure) from failure
        self.watch_for_timeout(f"NCCL's own {name}", work.is_completed)
        return _NcclWork(work, self._to_transport_error)

    def watch_for_timeout(self, description: str, is_completed: Callable[[], bool]) -> None:
        """End the process, naming ``description``, if the work exceeds the time-out."""
        self._watchdog.watch_for_timeout(description, is_completed)

    def close(self) -> None:
        """Leave the group, after the queued work unless the GPU is stuck."""
        if not self._watchdog.is_gpu_stuck:
            torch.cuda.synchronize()
            for group in self._lanes:
                group.shutdown()
        self._cpu_transport.close()

    def _to_transport_error(self, failure: RuntimeError) -> TransportError:
        """Return NCCL's error as ours, and mark the GPU as stuck: nothing waits for it any more."""
        self._watchdog.is_gpu_stuck = True
        return TransportError(
            f"rank {self.rank}: NCCL gave up: {clean_backend_message(str(failure))}"
        )


class _NcclWork:
    """A running collective of NCCL, on NCCL's own stream."""

    def __init__(
        self, work: C10dWork, to_transport_error: Callable[[RuntimeError], TransportError]
    ) -> None:
        self._work = work
        self._to_transport_error = to_transport_error
        self.finished_s: float | None = None

    def wait(self) -> None:
        """Make the current stream wait for the collective; the host goes on."""
        try:
            self._work.wait()
        except RuntimeError as failure:
            raise self._to_transport_error(failure) from failure


def open_nccl(
    store: Store, cpu_transport: Transport, device: torch.device, timeout_s: float
) -> NcclTransport:
    """Build a group over NCCL for the ranks of ``cpu_transport``; all ranks call this together.

    Args:
        store: The store over which NCCL's communicators find each other.
        cpu_transport: Carries CPU tensors, and the messages of `receive`.
        device: This rank's GPU.
        timeout_s: Seconds that GPU work may take before the process ends.

    Raises:
        ConfigError: This PyTorch has no NCCL, or there is no GPU.
    """
    nccl: Any = getattr(_distributed_c10d, "ProcessGroupNCCL", None)
    if nccl is None or not torch.cuda.is_available():
        raise ConfigError(
            "this PyTorch has no NCCL, or there is no GPU: use device cpu, or a build with CUDA"
        )

    def open_lane(lane: int) -> Backend:
        options = nccl.Options()
        options._timeout = timedelta(seconds=_NCCL_TIMEOUT_FACTOR * timeout_s)
        group = nccl(
            PrefixStore(f"lane/{lane}", store), cpu_transport.rank, cpu_transport.size, options
        )
        group.eager_connect_single_device(device)
        backend: Backend = group
        return backend

    return NcclTransport(
        cpu_transport, open_lane, GpuTimeoutWatchdog(cpu_transport.rank, timeout_s)
    )
