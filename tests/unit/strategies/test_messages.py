"""The messages of a training step are those of the schedule and the buckets, and no others."""

import pytest
import torch
from torch import nn

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import ALLREDUCE
from stretto.collectives.schedule import Action, chunk_bounds
from stretto.comm.in_process_transports import RecordingTransport, SentMessage, run_threads
from stretto.strategies import AllReduceConfig, build_strategy, resolve_bucket_lengths


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 30), nn.Linear(30, 5))


def expected_messages(algorithm: str, config: AllReduceConfig, rank: int, size: int):
    """Derive from the schedule and the bucket lengths alone what one rank sends."""
    sizes = [p.numel() for p in reversed(list(model().parameters()))]
    for count in resolve_bucket_lengths(config, model()):
        # One mark per tensor travels behind the gradients.
        numel = sum(sizes[:count]) + count
        del sizes[:count]
        schedule = ALLREDUCE[algorithm](Mesh((size,)), 1)
        if schedule.native:
            yield SentMessage(-1, 4 * numel)
            continue
        bounds = chunk_bounds(numel, schedule.num_chunks)
        for op in schedule.program(rank):
            num_bytes = 4 * (bounds[op.stop] - bounds[op.start])
            if op.action is Action.SEND and num_bytes:
                yield SentMessage(op.peer, num_bytes, op.lane)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_a_step_sends_exactly_its_schedule(algorithm, size):
    config = AllReduceConfig(algorithm=algorithm, bucket_bytes=1000)
    assert len(resolve_bucket_lengths(config, model())) > 2

    def work(transport):
        recorder = RecordingTransport(transport)
        strategy = build_strategy(config, recorder)
        net, optimizer = strategy.attach(model(), lambda p: torch.optim.SGD(p, lr=0.1))
        recorder.sent.clear()
        strategy.begin(0, 0, True, 0.1)
        net(torch.ones(2, 10)).sum().backward()
        strategy.after_backward()
        optimizer.step()
        strategy.after_update()
        strategy.close()
        return recorder.sent

    for rank, sent in enumerate(run_threads(size, work)):
        expected = list(expected_messages(algorithm, config, rank, size))
        for lane in {message.lane for message in expected}:  # lanes run beside each other
            assert [m for m in sent if m.lane == lane] == [m for m in expected if m.lane == lane]
        assert len(sent) == len(expected)
