"""Exchange the facts of all ranks over a store, and probe connections between ranks.

Ranks join the store, agree on who is present, probe each other's ports and send their reports to
the coordinator, the lowest rank that is present.

Every wait polls until a deadline, and no call asks the store for a key that may be missing. A store
that stops answering still blocks a call. `stretto.doctor.gather_facts` therefore runs all of this
in a thread that it can abandon.
"""

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from torch._C._distributed_c10d import PrefixStore, Store

from stretto.cluster.store import start_or_connect_store
from stretto.cluster.world import World
from stretto.doctor.port_probe import (
    CONNECT_TIMEOUT_S,
    PROBE_ROUND_S,
    peers_to_probe,
    probe_peers,
    serve_probes,
)
from stretto.doctor.records import (
    ClockOffset,
    Examination,
    Facts,
    ProbeEndpoint,
    ProbeReport,
    RunRequirements,
)
from stretto.errors import LaunchError

POLL_INTERVAL_S = 0.03
CLOCK_PUBLISH_INTERVAL_S = 0.05
CLOCK_TIMEOUT_S = 1.0
"""How long a rank waits for a tick of the coordinator's clock."""


class DoctorStore:
    """A torch store restricted to texts and counters of one generation of the doctor."""

    def __init__(self, store: Store, generation: int) -> None:
        self._store = PrefixStore(f"doctor/{generation}", store)

    def put(self, name: str, text: str) -> None:
        """Set a text."""
        self._store.set(name, text)

    def put_if_absent(self, name: str, text: str) -> str:
        """Set a text unless it exists; return the text that is stored then."""
        kept: bytes = self._store.compare_set(name, "", text)
        return kept.decode()

    def has(self, name: str) -> bool:
        """Return whether a text of that name exists."""
        return bool(self._store.check([name]))

    def read(self, name: str) -> str | None:
        """Return a text, or None if it does not exist yet."""
        return self._store.get(name).decode() if self.has(name) else None

    def add(self, name: str, amount: int = 1) -> int:
        """Add to a counter; return its new value."""
        return int(self._store.add(name, amount))


def wait_until(ready: Callable[[], bool], deadline_s: float) -> bool:
    """Poll until ``ready`` or the deadline (monotonic clock); return whether it became ready."""
    while not ready():
        if time.monotonic() > deadline_s:
            return False
        _pause()
    return True


def agree_on_present_ranks(
    store: DoctorStore, rank: int, size: int, deadline_s: float
) -> tuple[int, ...]:
    """Return the ranks that are present, equal on all of them.

    The list is fixed when all ranks are present, or when the first rank reaches its deadline. All
    ranks continue at that moment, whenever they started.

    Raises:
        LaunchError: The list was fixed without this rank.
    """
    store.put(f"here/{rank}", "")
    store.add("came")
    wait_until(lambda: store.has("roll") or store.add("came", 0) >= size, deadline_s)
    present_ranks = [other for other in range(size) if store.has(f"here/{other}")]
    agreed_ranks: list[int] = json.loads(
        store.read("roll") or store.put_if_absent("roll", json.dumps(present_ranks))
    )
    if rank not in agreed_ranks:
        raise LaunchError(
            f"rank {rank} came after the list of {size} ranks was closed: start all ranks "
            "together, or give them longer with --patience"
        )
    return tuple(agreed_ranks)


@contextmanager
def publish_clock(store: DoctorStore) -> Iterator[None]:
    """Publish this rank's wall clock every `CLOCK_PUBLISH_INTERVAL_S` while the context lasts."""
    stop_event = threading.Event()

    def tick() -> None:
        while not stop_event.wait(CLOCK_PUBLISH_INTERVAL_S):
            store.put("clock", repr(time.time()))

    thread = threading.Thread(target=tick, name="stretto-doctor-clock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()


def measure_clock_offset(
    store: DoctorStore, timeout_s: float = CLOCK_TIMEOUT_S
) -> ClockOffset | None:
    """Return how far this wall clock is ahead of the published one; None without a new tick.

    A tick was published after the start of the last read without it and before the end of the
    first read with it. The uncertainty is half of that interval.
    """
    deadline_s = time.monotonic() + timeout_s
    before, before_s = store.read("clock"), time.time()
    while time.monotonic() < deadline_s:
        began_s = time.time()
        published = store.read("clock")
        ended_s = time.time()
        if published is not None and published != before:
            return _offset_at_midpoint(before_s, ended_s, float(published))
        before_s = began_s
        _pause()
    return None


def publish(store: DoctorStore, kind: str, rank: int, text: str) -> None:
    """Store a text of ``rank`` under a kind."""
    store.put(f"{kind}/{rank}", text)


def collect(
    store: DoctorStore, kind: str, ranks: Sequence[int], deadline_s: float
) -> dict[int, str]:
    """Return the texts of one kind of those ``ranks`` that published one by the deadline."""
    wait_until(lambda: all(store.has(f"{kind}/{rank}") for rank in ranks), deadline_s)
    texts = {rank: store.read(f"{kind}/{rank}") for rank in ranks}
    return {rank: text for rank, text in texts.items() if text is not None}


def _pause() -> None:
    """Wait for a poll interval; `time.sleep` fails if libfaketime changes the wall clock."""
    threading.Event().wait(POLL_INTERVAL_S)


def _offset_at_midpoint(earliest_s: float, latest_s: float, published_s: float) -> ClockOffset:
    return ClockOffset(
        (earliest_s + latest_s) / 2 - published_s, max(0.0, latest_s - earliest_s) / 2
    )


SHUTDOWN_GRACE_S = 1.0
AFTER_RENDEZVOUS_S = CLOCK_TIMEOUT_S + PROBE_ROUND_S + SHUTDOWN_GRACE_S
"""Most seconds that everything after `agree_on_present_ranks` takes."""

T = TypeVar("T")

_FACTS_ADAPTER: TypeAdapter[Facts] = TypeAdapter(Facts)
_ENDPOINT_ADAPTER: TypeAdapter[ProbeEndpoint | None] = TypeAdapter(ProbeEndpoint | None)
_PROBE_REPORT_ADAPTER: TypeAdapter[ProbeReport] = TypeAdapter(ProbeReport)


def open_doctor_store(world: World, facts: Facts, deadline_s: float) -> DoctorStore:
    """Connect to the store once its port accepts connections.

    Raises:
        LaunchError: The port accepts no connection until the deadline.
    """
    store_address = world.store_address
    if store_address is not None and not (store_address.started_by_rank_0 and world.rank == 0):
        reason = _wait_for_port(store_address.host, store_address.port, deadline_s)
        if reason:
            network = facts.network
            raise LaunchError(
                f"rank {world.rank} on host {facts.identity.host} cannot reach the store at "
                f"{store_address.host}:{store_address.port} over "
                f"{network.route_interface or 'any interface'} "
                f"({network.address or 'no address'}): {reason}; is rank 0 or the launcher "
                f"running there? open TCP port {store_address.port} on that host, or set "
                "MASTER_ADDR to an address that this host can reach"
            )
    left_s = max(1.0, deadline_s - time.monotonic())
    return DoctorStore(start_or_connect_store(world, left_s), world.generation)


def _wait_for_port(host: str, port: int, deadline_s: float) -> str:
    """Wait until the port accepts a connection; return "" or the last error at the deadline."""
    reasons: list[str] = []

    def is_accepting() -> bool:
        try:
            socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as failure:
            reasons.append(str(failure.strerror or failure).lower())
            return False
        return True

    return "" if wait_until(is_accepting, deadline_s) else reasons[-1]


def exchange_facts(
    store: DoctorStore, world: World, facts: Facts, requirements: RunRequirements, deadline_s: float
) -> Examination | None:
    """Exchange facts and probe peers (collective); return all facts on the coordinator.

    Raises:
        LaunchError: A second process claims this rank, or the list of ranks was closed without it.
    """
    rank = world.rank
    if store.add(f"claim/{rank}") > 1:
        publish(store, "double", rank, f"host {facts.identity.host}, process {facts.identity.pid}")
        raise LaunchError(
            f"rank {rank} is there twice: this process on host {facts.identity.host} is the "
            "second; give every process a rank of its own"
        )
    with serve_probes(facts.network.address, rank, secrets.token_hex(8)) as endpoint:
        publish(store, "facts", rank, _FACTS_ADAPTER.dump_json(facts).decode())
        publish(store, "endpoint", rank, _ENDPOINT_ADAPTER.dump_json(endpoint).decode())
        present_ranks = agree_on_present_ranks(store, rank, world.size, deadline_s)
        limit_s = time.monotonic() + CLOCK_TIMEOUT_S + PROBE_ROUND_S
        if rank == present_ranks[0]:
            return _coordinate(store, world, requirements, present_ranks, limit_s)
        _probe_and_report(store, world, present_ranks, measure_clock_offset(store))
        wait_until(lambda: store.has("bye"), limit_s)
        store.add("left")
        return None


def _probe_and_report(
    store: DoctorStore, world: World, present_ranks: Sequence[int], clock: ClockOffset | None = None
) -> None:
    peers = peers_to_probe(world.rank, world.mesh, present_ranks)
    # No wait is needed: a rank publishes its endpoint before it counts as present.
    endpoints = _parse_valid(_ENDPOINT_ADAPTER, collect(store, "endpoint", peers, time.monotonic()))
    publish(
        store,
        "round",
        world.rank,
        _PROBE_REPORT_ADAPTER.dump_json(ProbeReport(probe_peers(endpoints), clock)).decode(),
    )


def _coordinate(
    store: DoctorStore,
    world: World,
    requirements: RunRequirements,
    present_ranks: Sequence[int],
    limit_s: float,
) -> Examination:
    """Publish the clock, probe peers and collect the reports of all ranks."""
    with publish_clock(store):
        _probe_and_report(store, world, present_ranks)
        probe_reports = collect(store, "round", present_ranks, limit_s)
    facts = collect(store, "facts", present_ranks, limit_s)
    duplicate_ranks = collect(store, "double", present_ranks, 0)
    store.put("bye", "")
    # This rank may hold the store, so it waits until the others no longer read from it.
    goodbye_s = time.monotonic() + SHUTDOWN_GRACE_S
    wait_until(lambda: store.add("left", 0) >= len(present_ranks) - 1, goodbye_s)
    return Examination(
        requirements=requirements,
        size=world.size,
        coordinator=world.rank,
        facts=_parse_valid(_FACTS_ADAPTER, facts),
        probe_reports=_parse_valid(_PROBE_REPORT_ADAPTER, probe_reports),
        present_ranks=tuple(present_ranks),
        duplicate_ranks=duplicate_ranks,
    )


def _parse_valid(adapter: TypeAdapter[T], texts: Mapping[int, str]) -> dict[int, T]:
    """Return the records that can be parsed; a rank with other code may use another format."""
    read = {}
    for rank, text in texts.items():
        try:
            read[rank] = adapter.validate_json(text)
        except ValidationError:
            continue
    return read
