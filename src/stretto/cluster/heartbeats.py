"""Heartbeats: each rank writes to the store every second and monitors the rank before it.

The heartbeat has its own thread and its own store connection, so it goes on while the rank waits
in a collective. Each rank polls the rank before it. When that rank is late, it polls all ranks, so
that the message names every silent rank of a host that hangs. A rank compares times of its own
monotonic clock only; clocks of different hosts are never compared.

A rank that is silent for `SILENCE_WARNING_S` is named in the log. After ``heartbeat_timeout_s`` its
monitor posts a `FailureReport` to the store. Then every rank exits its process, because no rank can
leave a collective by itself. A rank also exits when the store is gone, because then the process
that would have stopped the rank is gone too.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

from torch._C._distributed_c10d import PrefixStore, Store

from stretto.cluster.world import World
from stretto.telemetry.event_text import ranks_text

HEARTBEAT_INTERVAL_S = 1.0
SILENCE_WARNING_S = 4.0
"""Silence after which the log names a rank: four missed heartbeats."""

_EXIT_GRACE_S = 2.0
"""Wait between a failure report and exit: a rank that raises meanwhile gives a better message."""


@dataclass(frozen=True, slots=True)
class FailureReport:
    """The rank that failed and the reason; the first report in the store wins."""

    rank: int
    reason: str
    kind: Literal["failed", "silent"]


def post_failure_report(
    store: Store, generation: int, failure_report: FailureReport
) -> FailureReport:
    """Post a report unless the store already has one; return the report in the store."""
    stored_report = _heartbeat_store(store, generation).compare_set(
        "failure_report", "", json.dumps(asdict(failure_report))
    )
    return FailureReport(**json.loads(stored_report))


def read_failure_report(store: Store, generation: int = 0) -> FailureReport | None:
    """Return the report in the store, or None; does not wait."""
    heartbeat_store = _heartbeat_store(store, generation)
    if not heartbeat_store.check(["failure_report"]):
        return None
    return FailureReport(**json.loads(heartbeat_store.get("failure_report")))


def _heartbeat_store(store: Store, generation: int) -> Store:
    return PrefixStore(f"heartbeat/{generation}", store)


class Heartbeat:
    """The heartbeat thread of one rank.

    Creating it publishes the first heartbeat. Call `start` after the rendezvous, when all ranks
    have created theirs, and `stop` at the end.
    """

    def __init__(
        self,
        store: Store,
        world: World,
        heartbeat_timeout_s: float,
        log_line: Callable[[str], None],
    ) -> None:
        self._store = _heartbeat_store(store, world.generation)
        self._root_store = store
        self._world = world
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._log = log_line
        self.step = 0
        """The current step: written by the training loop, published with each heartbeat."""
        started_by_rank_0 = (
            world.store_address is not None and world.store_address.started_by_rank_0
        )
        self._store_owner = "rank 0" if started_by_rank_0 else "the launcher"
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stretto-heartbeats", daemon=True)
        self._publish_heartbeat(0)

    def start(self) -> None:
        """Start the thread; every rank must have created its `Heartbeat` before."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; later failures are no longer reported."""
        self._stop_requested.set()
        if self._thread.is_alive():
            self._thread.join()

    def _publish_heartbeat(self, count: int) -> None:
        self._store.set(f"heartbeat/{self._world.rank}", f"{count} {self.step}")

    def _run(self) -> None:
        monitor = HeartbeatMonitor(self._world.rank, self._world.size, self._heartbeat_timeout_s)
        count = 0
        try:
            while not self._stop_requested.wait(HEARTBEAT_INTERVAL_S):
                count += 1
                self._publish_heartbeat(count)
                self._check_peers(monitor)
        except RuntimeError:
            if not self._stop_requested.is_set():
                self._exit_process(
                    f"{self._store_owner} is gone (its store does not answer): ending too"
                )

    def _check_peers(self, monitor: "HeartbeatMonitor") -> None:
        polled_ranks = monitor.ranks_to_poll()
        replies = self._store.multi_get([f"heartbeat/{rank}" for rank in polled_ranks])
        observation = monitor.observe(
            dict(zip(polled_ranks, map(bytes.decode, replies), strict=True)), time.monotonic()
        )
        for line in observation.lines:
            self._log_line(line)
        if observation.failure_report is not None:
            post_failure_report(
                self._root_store, self._world.generation, observation.failure_report
            )
        if self._store.check(["failure_report"]) and not self._stop_requested.wait(_EXIT_GRACE_S):
            stored_report = read_failure_report(self._root_store, self._world.generation)
            self._exit_process(stored_report.reason if stored_report else "another rank failed")

    def _log_line(self, line: str) -> None:
        # The reader of standard error may have exited: that can be the reason for this line.
        with suppress(OSError, ValueError):
            self._log(line)

    def _exit_process(self, why: str) -> None:
        """End this process from the heartbeat thread: the main thread may hang forever."""
        try:
            self._log_line(why)
        finally:
            os._exit(1)


@dataclass(frozen=True, slots=True)
class HeartbeatObservation:
    """The result of one check: lines for the log, and a report once a rank has timed out."""

    lines: tuple[str, ...] = ()
    failure_report: FailureReport | None = None


class HeartbeatMonitor:
    """Decides which ranks are silent; the caller provides heartbeats and the time."""

    def __init__(self, rank: int, size: int, heartbeat_timeout_s: float) -> None:
        self._previous_rank = (rank - 1) % size
        self._others = [other for other in range(size) if other != rank]
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._last_check_s: float | None = None
        self._last_heartbeats: dict[int, tuple[str, float]] = {}
        """Rank -> its last heartbeat, and when this rank first saw it."""
        self._reported_silent: tuple[int, ...] = ()

    def ranks_to_poll(self) -> list[int]:
        """Return the ranks to poll: the previous rank, or all others once that one is late."""
        if not self._others:
            return []
        late = (
            self._last_check_s is not None
            and self._silence_of(self._previous_rank) > 1.5 * HEARTBEAT_INTERVAL_S
        )
        return self._others if late or self._reported_silent else [self._previous_rank]

    def observe(self, heartbeats: dict[int, str], now_s: float) -> HeartbeatObservation:
        """Note the ``heartbeats`` of the polled ranks, read at ``now_s``; return what follows.

        Args:
            heartbeats: Rank -> the text it published last, ``"COUNT STEP"``.
            now_s: Time of this rank's monotonic clock.
        """
        was_paused = (
            self._last_check_s is not None and now_s - self._last_check_s > 3 * HEARTBEAT_INTERVAL_S
        )
        self._last_check_s = now_s
        if was_paused:  # this process was stopped: the others' silence is not known
            self._last_heartbeats.clear()
        for rank, heartbeat in heartbeats.items():
            if self._last_heartbeats.get(rank, ("", 0.0))[0] != heartbeat:
                self._last_heartbeats[rank] = (heartbeat, now_s)
        return self._evaluate()

    def _silence_of(self, rank: int) -> float:
        assert self._last_check_s is not None
        return (
            self._last_check_s - self._last_heartbeats[rank][1]
            if rank in self._last_heartbeats
            else 0.0
        )

    def _evaluate(self) -> HeartbeatObservation:
        longest_s = self._silence_of(self._previous_rank)
        if longest_s < SILENCE_WARNING_S:
            recovered = self._reported_silent
            self._reported_silent = ()
            return HeartbeatObservation(
                (f"{ranks_text(recovered)}: heartbeats are back",) if recovered else ()
            )
        silent = tuple(
            r for r in self._last_heartbeats if self._silence_of(r) >= 2 * HEARTBEAT_INTERVAL_S
        )
        step = self._last_heartbeats[self._previous_rank][0].split()[1]
        silence = f"silent for {longest_s:.0f} s, last heartbeat at step {step}"
        if longest_s >= self._heartbeat_timeout_s:
            reason = f"{ranks_text(silent)} {silence}: given up (run.heartbeat_timeout_s)"
            return HeartbeatObservation(
                failure_report=FailureReport(self._previous_rank, reason, "silent")
            )
        if silent == self._reported_silent:
            return HeartbeatObservation()
        self._reported_silent = silent
        return HeartbeatObservation((f"{ranks_text(silent)} {silence}; the others wait",))
