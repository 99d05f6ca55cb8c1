"""Real processes over Gloo: the store's address, a death, and the next generation."""

import subprocess
import sys
from pathlib import Path

import pytest

from stretto.cluster.store import hold_store
from stretto.errors import LaunchError

pytestmark = pytest.mark.multi

RANK = """
import os, sys, torch
from stretto.cluster.store import join_store
from stretto.cluster.world import Meeting, Mesh, World
from stretto.comm.algorithms import ALLREDUCE
from stretto.comm.courier import Courier
from stretto.comm.execute import execute
from stretto.comm.recording import RecordingChannel
from stretto.comm.gloo import open_channel
from stretto.errors import ChannelError

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = join_store(World(rank, Mesh((3,)), Meeting("127.0.0.1", port)))

def total(channel, algorithm):
    mine = torch.full((1000,), float(rank + 1))
    execute(ALLREDUCE[algorithm](channel.mesh, 2), mine, channel)
    return mine.unique().tolist()

def wrong(channel):
    with Courier(channel) as courier:
        for name in ("ring", "hierarchical", "native"):
            mine = torch.zeros(1000 + (rank == 1))
            try:
                courier.start(courier.prepare(ALLREDUCE[name](channel.mesh, 1), mine))
            except ChannelError as failure:
                print("differs", failure, flush=True)

def nowhere():
    try:
        open_channel(store, rank=rank, members=[0, 1, 2], generation=7, interface="nope")
    except ChannelError as failure:
        print("interface", failure, flush=True)

channel = open_channel(store, rank=rank, members=[0, 1, 2], generation=0, timeout_s=30)
print("whole", *{str(total(channel, name)) for name in ALLREDUCE}, flush=True)
wrong(channel)
nowhere()
recorder = RecordingChannel(channel)
for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
    for name in ALLREDUCE:
        for length in (0, 1, 7, 1001):
            mine = torch.full((length,), rank + 1, dtype=dtype)
            execute(ALLREDUCE[name](channel.mesh, 1), mine, recorder)
            assert mine.eq(6).all(), (dtype, name, length)
recorder.sent.clear()
for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
    for length in (1, 7, 1001):
        execute(ALLREDUCE["ring"](channel.mesh, 1), torch.zeros(length, dtype=dtype), recorder)
print("types", sum(m.num_bytes for m in recorder.sent if m.peer >= 0), flush=True)
if rank == 1:
    os._exit(9)
try:
    with Courier(channel) as courier:
        courier.agree = lambda *_errands: None  # agreed before; the death comes in the middle
        errand = courier.prepare(ALLREDUCE["ring"](Mesh((3,)), 2), torch.zeros(1000))
        for _ in range(50):
            courier.run(errand)
except ChannelError as failure:
    print("error", failure, flush=True)
channel.close()
channel = open_channel(store, rank=rank, members=[0, 2], generation=1, timeout_s=30)
print("rebuilt", channel.rank, *{str(total(channel, name)) for name in ALLREDUCE}, flush=True)
"""


@pytest.fixture(scope="module")
def said():
    held = hold_store()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(held.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [process.communicate(timeout=100) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 9, 0], outputs
    return [out.splitlines() for out, _ in outputs]


def test_every_algorithm_sums_over_processes(said):
    assert [lines[0] for lines in said] == ["whole [6.0]"] * 3


def test_sizes_that_differ_are_named_on_every_rank_before_anything_is_sent(said):
    for lines in said:
        told = [line for line in lines if line.startswith("differs")]
        assert len(told) == 3
        assert "rank 0 begins ring over 1000 x torch.float32, rank 1 ring over 1001" in told[0]
        assert "hierarchical over 1000" in told[1]
        assert "native over 1000" in told[2]


def test_a_wrong_interface_is_named_on_every_rank(said):
    for rank, lines in enumerate(said):
        (told,) = [line for line in lines if line.startswith("interface")]
        assert f"rank {rank} could not join generation 7 of 3 ranks on interface nope" in told


def test_every_type_and_length_travels_and_the_ring_sends_its_share(said):
    # Twice (n-1)/n of each tensor, over the types' sizes; rounding to whole chunks evens out.
    whole = sum(length * (8 + 4 + 2 + 2) for length in (1, 7, 1001))
    sent = [int(line.removeprefix("types ")) for lines in said for line in lines if "types" in line]
    assert sum(sent) == 4 * whole


def test_survivors_are_told_which_peer_they_lost(said):
    errors = {rank: next(x for x in said[rank] if x.startswith("error")) for rank in (0, 2)}
    for told in errors.values():
        assert "; in ring/2 for 3 ranks, round " in told
    assert errors[2].startswith("error rank 2 lost rank 1")
    # Rank 0 hears of it from its own neighbour in the ring: whoever fell silent first for it.
    assert errors[0].startswith("error rank 0 lost rank")


def test_survivors_meet_again_in_the_next_generation(said):
    assert said[0][-1] == "rebuilt 0 [4.0]"
    assert said[2][-1] == "rebuilt 1 [4.0]"


def listening(port: int) -> set[str]:
    """Return the local addresses, in the kernel's hexadecimal, that listen on ``port``."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, at = local.split(":")
            if int(at, 16) == port and state == "0A":
                found.add(address)
    return found


def test_a_store_listens_on_the_named_address_alone():
    held = hold_store("127.0.0.1")
    assert listening(held.port) == {"0100007F"}


def test_an_address_that_is_not_ours_is_refused():
    with pytest.raises(LaunchError, match=r"cannot listen on 198\.18\.77\.77"):
        hold_store("198.18.77.77")
