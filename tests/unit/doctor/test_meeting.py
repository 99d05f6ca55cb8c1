"""Doors, rounds, the roll and the clock, with threads for ranks."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from stretto.cluster.world import Meeting, Mesh, World
from stretto.doctor import roll
from stretto.doctor.attend import attend
from stretto.doctor.door import knock, opened
from stretto.doctor.records import Door
from stretto.doctor.roll import Board, call_the_roll, compare_clocks, ticking
from stretto.doctor.rounds import ALL_PAIRS_UP_TO, go_round, peers_to_visit
from stretto.errors import LaunchError
from tests.unit.doctor.made_up import PURPOSE, facts_of


@pytest.fixture
def board():
    return Board(HashStore(), 0)


def soon(seconds=0.2):
    return time.monotonic() + seconds


def test_a_door_answers_whoever_knows_the_word():
    with opened("127.0.0.1", 3, "word") as door:
        assert knock(door, 3) == ""


def test_a_door_does_not_answer_another_word():
    with opened("127.0.0.1", 3, "word") as door:
        assert "without an answer" in knock(replace(door, token="guess"), 3)


def test_the_door_of_another_rank_is_not_taken_for_it():
    with opened("127.0.0.1", 3, "word") as door:
        assert "another program answers" in knock(door, 4)


def test_a_closed_door_is_refused():
    with opened("127.0.0.1", 3, "word") as door:
        pass
    assert knock(door, 3) == "refused"


def test_without_an_address_there_is_no_door():
    with opened("", 3, "word") as door:
        assert door is None
    assert "no address" in go_round({3: None})[0].failure


def test_who_accepts_and_does_not_answer_is_told_from_who_does_not_accept():
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        door = Door("127.0.0.1", deaf.getsockname()[1], "word")
        assert "nobody answers" in knock(door, 0)


def test_a_connection_that_is_reset_is_told():
    with socket.create_server(("127.0.0.1", 0)) as rude:

        def slam():
            visitor, _ = rude.accept()
            visitor.recv(1)
            visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            visitor.close()

        thread = threading.Thread(target=slam)
        thread.start()
        assert "reset" in knock(Door("127.0.0.1", rude.getsockname()[1], "word"), 0)
        thread.join()


def test_a_round_visits_every_door_and_tells_open_from_closed():
    with opened("127.0.0.1", 1, "a") as one, opened("127.0.0.1", 2, "b") as two:
        visits = go_round({1: one, 2: replace(two, token="guess"), 5: None})
    assert [(visit.peer, bool(visit.failure)) for visit in visits] == [
        (1, False),
        (2, True),
        (5, True),
    ]


@given(st.data())
def test_a_world_is_visited_so_that_every_rank_and_every_pair_of_hosts_is_tried(data):
    mesh = Mesh(tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=20))))
    missing = data.draw(st.sets(st.integers(0, mesh.size - 1), max_size=mesh.size - 1))
    came = [rank for rank in range(mesh.size) if rank not in missing]
    pairs = {(rank, peer) for rank in came for peer in peers_to_visit(rank, mesh, came)}
    assert all(rank != peer and peer in came for rank, peer in pairs)
    if len(came) <= ALL_PAIRS_UP_TO:
        assert len(pairs) == len(came) * (len(came) - 1)
    hosts = {mesh.host_of(rank) for rank in came}
    tried = {(mesh.host_of(rank), mesh.host_of(peer)) for rank, peer in pairs}
    assert {(a, b) for a in hosts for b in hosts if a != b} <= tried
    if len(came) > 1:
        assert {rank for rank, _ in pairs} == {peer for _, peer in pairs} == set(came)


def test_in_a_large_world_a_rank_visits_few():
    mesh = Mesh((8,) * 16)
    assert peers_to_visit(9, mesh, range(128)) == [8, 10]
    assert len(peers_to_visit(8, mesh, range(128))) == 15 + 2


def test_the_roll_closes_at_once_when_all_came(board):
    with ThreadPoolExecutor(3) as pool:
        rolls = pool.map(lambda rank: call_the_roll(board, rank, 3, soon(30)), range(3))
        assert set(rolls) == {(0, 1, 2)}


def test_the_first_whose_patience_ends_closes_the_roll_for_all(board):
    patience_s = [0.2, 30, 30]
    began_s = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        rolls = pool.map(
            lambda rank: call_the_roll(board, rank, 3, soon(patience_s[rank])), range(2)
        )
        assert set(rolls) == {(0, 1)}
    assert time.monotonic() - began_s < 15


def test_who_comes_after_the_roll_is_told_so(board):
    call_the_roll(board, 0, 2, soon())
    with pytest.raises(LaunchError, match=r"rank 1 came after the roll.*--patience"):
        call_the_roll(board, 1, 2, soon())


def test_a_rank_that_speaks_otherwise_is_there_but_not_understood(board):
    told = {"here": "", "facts": '{"other": "form"}', "door": "null", "round": '{"visits": []}'}
    for kind, text in told.items():
        board.post(f"{kind}/1", text)
    board.count("came")
    board.count("left")
    world = World(0, Mesh((2,)), meeting=Meeting("127.0.0.1", 1))
    own = facts_of(0, 2)
    own = replace(own, network=replace(own.network, address="127.0.0.1"))
    seen = attend(board, world, own, PURPOSE, soon(30))
    assert (seen.came, set(seen.facts), set(seen.rounds)) == ((0, 1), {0}, {0, 1})


def test_a_clock_set_forward_is_measured(board, monkeypatch):
    class Ahead:
        """The speaker's clock; the thread that compares keeps the real one."""

        def __getattr__(self, name):
            return getattr(time, name)

        def time(self):
            is_speaker = threading.current_thread().name == "stretto-doctor-clock"
            return time.time() - (100.0 if is_speaker else 0.0)

    monkeypatch.setattr(roll, "time", Ahead())
    with ticking(board):
        measured = compare_clocks(board)
    assert abs(measured.ahead_s - 100.0) <= measured.uncertainty_s + 0.01
    assert measured.uncertainty_s < 1.0


def test_a_clock_that_does_not_tick_is_not_guessed(board):
    assert compare_clocks(board, timeout_s=0.2) is None
    board.post("clock", "12.5")
    assert compare_clocks(board, timeout_s=0.2) is None
