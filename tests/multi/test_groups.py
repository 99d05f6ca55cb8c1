"""Real processes over Gloo: collectives, errors, a death, and the next generation."""

import subprocess
import sys
from pathlib import Path

import pytest

from stretto.cluster.store import serve_store
from stretto.errors import LaunchError

pytestmark = pytest.mark.multi

RANK = """
import os, sys, torch
from stretto.cluster.store import start_or_connect_store
from stretto.cluster.world import StoreAddress, Mesh, World
from stretto.collectives.algorithms import ALLREDUCE
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.collective_executor import execute
from stretto.comm.in_process_transports import RecordingTransport
from stretto.comm.gloo import open_gloo
from stretto.errors import TransportError

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = start_or_connect_store(World(rank, Mesh((3,)), StoreAddress("127.0.0.1", port)))

def total(transport, algorithm):
    tensor = torch.full((1000,), float(rank + 1))
    execute(ALLREDUCE[algorithm](transport.mesh, 2), tensor, transport)
    return tensor.unique().tolist()

def wrong(transport):
    with CollectiveExecutor(transport) as executor:
        for name in ("ring", "hierarchical", "native"):
            tensor = torch.zeros(1000 + (rank == 1))
            try:
                executor.start(executor.prepare(ALLREDUCE[name](transport.mesh, 1), tensor))
            except TransportError as failure:
                print("differs", failure, flush=True)

def nowhere():
    try:
        open_gloo(store, rank=rank, members=[0, 1, 2], generation=7, interface="nope")
    except TransportError as failure:
        print("interface", failure, flush=True)

transport = open_gloo(store, rank=rank, members=[0, 1, 2], generation=0, timeout_s=30)
print("whole", *{str(total(transport, name)) for name in ALLREDUCE}, flush=True)
wrong(transport)
nowhere()
recorder = RecordingTransport(transport)
for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
    for name in ALLREDUCE:
        for length in (0, 1, 7, 1001):
            tensor = torch.full((length,), rank + 1, dtype=dtype)
            execute(ALLREDUCE[name](transport.mesh, 1), tensor, recorder)
            assert tensor.eq(6).all(), (dtype, name, length)
recorder.sent.clear()
for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
    for length in (1, 7, 1001):
        execute(ALLREDUCE["ring"](transport.mesh, 1), torch.zeros(length, dtype=dtype), recorder)
print("types", sum(m.num_bytes for m in recorder.sent if m.peer >= 0), flush=True)
if rank == 1:
    os._exit(9)
try:
    with CollectiveExecutor(transport) as executor:
        executor.check_same_on_all_ranks = lambda *_bound_schedules: None  # rank 1 is dead
        bound = executor.prepare(ALLREDUCE["ring"](Mesh((3,)), 2), torch.zeros(1000))
        for _ in range(50):
            executor.run(bound)
except TransportError as failure:
    print("error", failure, flush=True)
transport.close()
transport = open_gloo(store, rank=rank, members=[0, 2], generation=1, timeout_s=30)
print("rebuilt", transport.rank, *{str(total(transport, name)) for name in ALLREDUCE}, flush=True)
os._exit(0)  # as every process of ours that has used Gloo
"""


@pytest.fixture(scope="module")
def said():
    server = serve_store()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(server.port)],
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


def test_different_sizes_are_named_on_every_rank_before_anything_is_sent(said):
    for lines in said:
        errors = [line for line in lines if line.startswith("differs")]
        assert len(errors) == 3
        assert "rank 0 begins ring over 1000 x torch.float32, rank 1 ring over 1001" in errors[0]
        assert "hierarchical over 1000" in errors[1]
        assert "native over 1000" in errors[2]


def test_a_wrong_interface_is_named_on_every_rank(said):
    for rank, lines in enumerate(said):
        (error,) = [line for line in lines if line.startswith("interface")]
        assert f"rank {rank} could not join generation 7 of 3 ranks on interface nope" in error


def test_the_ring_sends_its_share_of_every_type_and_length(said):
    # 2 (n-1)/n of each tensor by each of n = 3 ranks; rounding to whole chunks cancels out.
    whole = sum(length * (8 + 4 + 2 + 2) for length in (1, 7, 1001))
    sent = [int(line.removeprefix("types ")) for lines in said for line in lines if "types" in line]
    assert sum(sent) == 4 * whole


def test_survivors_get_the_rank_of_the_lost_peer(said):
    errors = {rank: next(x for x in said[rank] if x.startswith("error")) for rank in (0, 2)}
    for error in errors.values():
        assert "; in ring/2 for 3 ranks, round " in error
    assert errors[2].startswith("error rank 2 lost rank 1")
    # Rank 0 names its own neighbour in the ring, which stopped sending.
    assert errors[0].startswith("error rank 0 lost rank")


def test_survivors_form_the_next_generation(said):
    assert said[0][-1] == "rebuilt 0 [4.0]"
    assert said[2][-1] == "rebuilt 1 [4.0]"


LEAVES_DURING_A_SUM = """
import os, sys, torch
from stretto.cluster.store import start_or_connect_store
from stretto.cluster.world import StoreAddress, Mesh, World
from stretto.comm.gloo import open_gloo

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = start_or_connect_store(World(rank, Mesh((2,)), StoreAddress("127.0.0.1", port)))
transport = open_gloo(store, rank=rank, members=[0, 1], timeout_s=30)
if rank == 0:
    work = transport.start_all_reduce(torch.ones(1000))
    transport.close()
    del work, transport
print("closed", flush=True)
sys.stdin.readline()
os._exit(0)
"""


def test_a_rank_that_leaves_during_a_sum_survives_the_end_of_the_sum():
    server = serve_store()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    script = [sys.executable, "-c", LEAVES_DURING_A_SUM]
    leaves, other = (
        subprocess.Popen([*script, str(rank), str(server.port)], text=True, **pipes)
        for rank in range(2)
    )
    assert [process.stdout.readline() for process in (leaves, other)] == ["closed\n"] * 2
    other.kill()  # the sum fails on a thread of Gloo
    other.communicate()
    with pytest.raises(subprocess.TimeoutExpired):
        leaves.wait(2)
    _, errors = leaves.communicate("end\n", timeout=20)
    assert (leaves.returncode, errors) == (0, "")


def listening(port: int) -> set[str]:
    """Return the local addresses that listen on ``port``, in the hexadecimal form of the kernel."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, at = local.split(":")
            if int(at, 16) == port and state == "0A":
                found.add(address)
    return found


def test_a_store_listens_on_the_given_address_only():
    server = serve_store("127.0.0.1")
    assert listening(server.port) == {"0100007F"}


def test_an_address_of_another_host_is_refused():
    with pytest.raises(LaunchError, match=r"cannot listen on 198\.18\.77\.77"):
        serve_store("198.18.77.77")
