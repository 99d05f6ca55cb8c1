"""Asynchronous gossip as real processes: it ends, is saved and goes on; who is lost is noticed."""

import subprocess
import sys

import pytest
import torch

from stretto.cluster.store import hold_store
from tests.multi.small_run import stretto, train, write_run

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]


# The run file's table is one of another strategy: it is taken back first.
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
    assert "ranks' own models: loss" in said
    check_means(tensors, 4)


def test_an_odd_number_goes_on_where_it_was_stopped(tmp_path):
    folder = write_run(tmp_path)
    short = stretto(folder, "train", "run.toml", "run.name=cut", "train.steps=5", *WORDS, "3")
    assert short.returncode == 0, short.stderr
    # In which order messages arrive is nobody's choice: no two runs have the same bits.
    said, resumed = train(folder, "cut", *WORDS, "3", "--resume")
    assert "resumed at step 5" in said
    check_means(resumed, 3)


RANK = """
import sys, time, torch
from stretto.cluster.store import join_store
from stretto.cluster.world import Meeting, Mesh, World
from stretto.comm.channel import Parcel
from stretto.comm.gloo import open_channel
from stretto.errors import ChannelError

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = join_store(World(rank, Mesh((2,)), Meeting("127.0.0.1", port)))
channel = open_channel(store, rank=rank, members=[0, 1], timeout_s=1)
word = torch.full((1,), 7.0 - 7 * rank)
if rank == 0:
    time.sleep(2)
    channel.exchange([Parcel(1, word)], [])
    time.sleep(2)
else:
    channel.hear(Parcel(0, word))
    print("heard", word.item())
    try:
        channel.hear(Parcel(0, word))
    except ChannelError as failure:
        print(failure)
"""


def test_who_listens_is_patient_with_a_silent_peer_and_notices_one_that_is_gone():
    held = hold_store()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(held.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in ranks]
    heard, lost = outputs[1][0].splitlines()
    assert heard == "heard 7.0", outputs
    assert lost.startswith("rank 1 lost rank 0"), outputs
