"""AD-PSGD in real processes: runs end, are saved and resumed; a lost peer is noticed."""

import subprocess
import sys

import pytest
import torch

from stretto.cluster.store import serve_store
from tests.multi.small_run import stretto, train, write_run

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]


# The run file's table is of another strategy, so it is reset first.
WORDS = ["strategy=", "strategy.kind=adpsgd", "train.eval_every=3", "--workers"]


def check_means(tensors, workers):
    """See that a checkpoint has a model of every rank beside their mean."""
    names = [name.removeprefix("model/") for name in tensors if name.startswith("model/")]
    trained = [name for name in names if f"rank-0/strategy/parameters/{name}" in tensors]
    assert trained
    for name in trained:
        own = [tensors[f"rank-{rank}/strategy/parameters/{name}"] for rank in range(workers)]
        # Of a pair that has just averaged both have the same.
        assert not all(torch.equal(own[0], other) for other in own)
        mean = torch.stack(own).double().mean(dim=0)
        torch.testing.assert_close(tensors[f"model/{name}"].double(), mean, rtol=0, atol=1e-6)


def test_processes_average_in_pairs(tmp_path):
    said, tensors = train(write_run(tmp_path), "whole", *WORDS, "4")
    assert "models of the ranks: loss" in said
    check_means(tensors, 4)


def test_an_odd_number_goes_on_where_it_was_stopped(tmp_path):
    folder = write_run(tmp_path)
    short = stretto(folder, "train", "run.toml", "run.name=cut", "train.steps=5", *WORDS, "3")
    assert short.returncode == 0, short.stderr
    # The order of messages is not determined, so two runs do not have the same bits.
    said, resumed = train(folder, "cut", *WORDS, "3", "--resume")
    assert "resumed at step 5" in said
    check_means(resumed, 3)


RANK = """
import sys, time, torch
from stretto.cluster.store import start_or_connect_store
from stretto.cluster.world import Mesh, StoreAddress, World
from stretto.comm.transport import P2POp
from stretto.comm.gloo import open_gloo
from stretto.errors import TransportError

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = start_or_connect_store(World(rank, Mesh((2,)), StoreAddress("127.0.0.1", port)))
transport = open_gloo(store, rank=rank, members=[0, 1], timeout_s=1)
word = torch.full((1,), 7.0 - 7 * rank)
if rank == 0:
    time.sleep(2)
    transport.exchange([P2POp(1, word)], [])
    time.sleep(2)
else:
    transport.receive(P2POp(0, word))
    print("received", word.item())
    try:
        transport.receive(P2POp(0, word))
    except TransportError as failure:
        print(failure)
"""


def test_a_receive_waits_for_a_silent_peer_and_notices_one_that_is_gone():
    server = serve_store()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(server.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in ranks]
    received, lost = outputs[1][0].splitlines()
    assert received == "received 7.0", outputs
    assert lost.startswith("rank 1 lost rank 0"), outputs
