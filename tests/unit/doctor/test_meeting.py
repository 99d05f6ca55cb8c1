"""Port probes, the list of present ranks and the clock, with threads for ranks."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from stretto.cluster.world import Mesh, StoreAddress, World
from stretto.doctor import exchange_facts as exchange_module
from stretto.doctor.exchange_facts import (
    DoctorStore,
    agree_on_present_ranks,
    exchange_facts,
    measure_clock_offset,
    publish_clock,
)
from stretto.doctor.port_probe import (
    ALL_PAIRS_MAX_RANKS,
    peers_to_probe,
    probe_peers,
    probe_port,
    serve_probes,
)
from stretto.doctor.records import ProbeEndpoint
from stretto.errors import LaunchError
from tests.unit.doctor.examples import PURPOSE, facts_of


@pytest.fixture
def store():
    return DoctorStore(HashStore(), 0)


def soon(seconds=0.2):
    return time.monotonic() + seconds


def test_an_endpoint_answers_its_token():
    with serve_probes("127.0.0.1", 3, "word") as endpoint:
        assert probe_port(endpoint, 3) == ""


def test_an_endpoint_does_not_answer_another_token():
    with serve_probes("127.0.0.1", 3, "word") as endpoint:
        assert "without an answer" in probe_port(replace(endpoint, token="guess"), 3)


def test_the_endpoint_of_another_rank_is_not_taken_for_it():
    with serve_probes("127.0.0.1", 3, "word") as endpoint:
        assert "another program answers" in probe_port(endpoint, 4)


def test_a_closed_port_is_refused():
    with serve_probes("127.0.0.1", 3, "word") as endpoint:
        pass
    assert probe_port(endpoint, 3) == "refused"


def test_without_an_address_there_is_no_endpoint():
    with serve_probes("", 3, "word") as endpoint:
        assert endpoint is None
    assert "no address" in probe_peers({3: None})[0].failure


def test_a_peer_that_accepts_and_does_not_answer_differs_from_one_that_does_not_accept():
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        endpoint = ProbeEndpoint("127.0.0.1", deaf.getsockname()[1], "word")
        assert "nobody answers" in probe_port(endpoint, 0)


def test_a_connection_that_is_reset_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as rude:

        def slam():
            client, _ = rude.accept()
            client.recv(1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()

        thread = threading.Thread(target=slam)
        thread.start()
        assert "reset" in probe_port(ProbeEndpoint("127.0.0.1", rude.getsockname()[1], "word"), 0)
        thread.join()


def test_every_endpoint_is_probed_and_open_ones_differ_from_closed_ones():
    with serve_probes("127.0.0.1", 1, "a") as one, serve_probes("127.0.0.1", 2, "b") as two:
        probes = probe_peers({1: one, 2: replace(two, token="guess"), 5: None})
    assert [(probe.peer, bool(probe.failure)) for probe in probes] == [
        (1, False),
        (2, True),
        (5, True),
    ]


@given(st.data())
def test_probes_cover_every_rank_and_every_pair_of_hosts(data):
    mesh = Mesh(tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=20))))
    missing = data.draw(st.sets(st.integers(0, mesh.size - 1), max_size=mesh.size - 1))
    present_ranks = [rank for rank in range(mesh.size) if rank not in missing]
    pairs = {
        (rank, peer) for rank in present_ranks for peer in peers_to_probe(rank, mesh, present_ranks)
    }
    assert all(rank != peer and peer in present_ranks for rank, peer in pairs)
    if len(present_ranks) <= ALL_PAIRS_MAX_RANKS:
        assert len(pairs) == len(present_ranks) * (len(present_ranks) - 1)
    hosts = {mesh.host_of(rank) for rank in present_ranks}
    tried = {(mesh.host_of(rank), mesh.host_of(peer)) for rank, peer in pairs}
    assert {(a, b) for a in hosts for b in hosts if a != b} <= tried
    if len(present_ranks) > 1:
        assert {rank for rank, _ in pairs} == {peer for _, peer in pairs} == set(present_ranks)


def test_in_a_large_world_a_rank_probes_few_peers():
    mesh = Mesh((8,) * 16)
    assert peers_to_probe(9, mesh, range(128)) == [8, 10]
    assert len(peers_to_probe(8, mesh, range(128))) == 15 + 2


def test_the_list_of_ranks_closes_at_once_when_all_came(store):
    with ThreadPoolExecutor(3) as pool:
        rolls = pool.map(lambda rank: agree_on_present_ranks(store, rank, 3, soon(30)), range(3))
        assert set(rolls) == {(0, 1, 2)}


def test_the_first_rank_at_its_deadline_closes_the_list_for_all(store):
    patience_s = [0.2, 30, 30]
    began_s = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        rolls = pool.map(
            lambda rank: agree_on_present_ranks(store, rank, 3, soon(patience_s[rank])), range(2)
        )
        assert set(rolls) == {(0, 1)}
    assert time.monotonic() - began_s < 15


def test_a_rank_that_comes_after_the_list_was_closed_is_refused(store):
    agree_on_present_ranks(store, 0, 2, soon())
    with pytest.raises(LaunchError, match=r"rank 1 came after the list.*--patience"):
        agree_on_present_ranks(store, 1, 2, soon())


def test_a_rank_with_facts_in_another_form_counts_as_present_without_facts(store):
    texts = {
        "here": "",
        "facts": '{"other": "form"}',
        "endpoint": "null",
        "round": '{"probes": []}',
    }
    for kind, text in texts.items():
        store.put(f"{kind}/1", text)
    store.add("came")
    store.add("left")
    world = World(0, Mesh((2,)), store_address=StoreAddress("127.0.0.1", 1))
    own = facts_of(0, 2)
    own = replace(own, network=replace(own.network, address="127.0.0.1"))
    seen = exchange_facts(store, world, own, PURPOSE, soon(30))
    assert (seen.present_ranks, set(seen.facts), set(seen.probe_reports)) == ((0, 1), {0}, {0, 1})


def test_a_clock_set_forward_is_measured(store, monkeypatch):
    class Ahead:
        """The coordinator's clock; the thread that compares keeps the real one."""

        def __getattr__(self, name):
            return getattr(time, name)

        def time(self):
            is_coordinator = threading.current_thread().name == "stretto-doctor-clock"
            return time.time() - (100.0 if is_coordinator else 0.0)

    monkeypatch.setattr(exchange_module, "time", Ahead())
    with publish_clock(store):
        measured = measure_clock_offset(store)
    assert abs(measured.ahead_s - 100.0) <= measured.uncertainty_s + 0.01
    assert measured.uncertainty_s < 1.0


def test_a_clock_that_does_not_tick_is_not_guessed(store):
    assert measure_clock_offset(store, timeout_s=0.2) is None
    store.put("clock", "12.5")
    assert measure_clock_offset(store, timeout_s=0.2) is None
