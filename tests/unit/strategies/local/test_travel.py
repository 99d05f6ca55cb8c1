"""What rounds send, beside whom, and in what type they are kept."""

import pytest
import torch
from torch import nn

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import ALLREDUCE
from stretto.collectives.verify import verify_allreduce
from stretto.comm.in_process_transports import RecordingTransport, SentMessage, run_threads
from stretto.strategies import DiLoCoConfig, LocalSGDConfig, NoLoCoConfig, build_strategy
from stretto.strategies.local_fragments import new_flat_buffer, shift_lanes

NUMEL = 4 * 3 + 3


@pytest.mark.parametrize("name", [name for name in ALLREDUCE if name != "native"])
def test_a_schedule_beside_others_is_the_same_sum_and_leaves_lane_0_to_them(name):
    schedule = shift_lanes(ALLREDUCE[name](Mesh((2, 2)), 2))
    verify_allreduce(schedule)
    assert all(op.lane >= 1 for rank in range(4) for op in schedule.program(rank))


def stepped(config, dtype=torch.float32, size=4, steps=4):
    """Let ranks move apart by their number at every step; return messages and weights of each."""

    def on_rank(transport):
        recorder = RecordingTransport(transport)
        strategy = build_strategy(config, recorder)
        model, optimizer = strategy.attach(
            nn.Linear(4, 3, dtype=dtype), lambda p: torch.optim.SGD(p, lr=1.0)
        )
        before = [p.detach().clone() for p in model.parameters()]
        recorder.sent.clear()
        for step in range(steps):
            strategy.begin(step, 0, True, 1.0)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, transport.rank / 64)
            strategy.after_backward()
            optimizer.step()
            strategy.after_update()
        strategy.close()
        moved = [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]
        return recorder.sent, moved

    return run_threads(size, on_rank)


def test_noloco_tells_one_peer_its_parameters_once_in_a_round_and_nobody_else_anything():
    for rank, (sent, _) in enumerate(stepped(NoLoCoConfig(every=2))):
        assert len(sent) == 2
        assert all(m.num_bytes == 4 * NUMEL and m.peer not in (-1, rank) for m in sent)


def test_nothing_is_sent_between_rounds():
    for sent, _ in stepped(LocalSGDConfig(every=3), steps=5):
        assert sent == [SentMessage(-1, 4 * NUMEL)]


@pytest.mark.parametrize(("wire", "num_bytes"), [("own", 4), ("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_differences_travel_as_the_wire_says(wire, num_bytes):
    for sent, moved in stepped(LocalSGDConfig(every=4, wire=wire)):
        assert sent == [SentMessage(-1, num_bytes * NUMEL)]
        # Gradients are times ranks: 4 steps of a mean of 1.5 / 64 times 4, which all types can say.
        for tensor in moved:
            torch.testing.assert_close(tensor, torch.full_like(tensor, 4 * 4 * 1.5 / 64))


def test_parameters_of_16_bits_begin_again_in_32():
    half = nn.Linear(4, 3, dtype=torch.bfloat16)
    assert new_flat_buffer(list(half.parameters())).dtype == torch.float32
    assert new_flat_buffer(list(half.parameters()), torch.float16).dtype == torch.float16
    assert new_flat_buffer(list(half.double().parameters())).dtype == torch.float64
    for sent, moved in stepped(DiLoCoConfig(every=4, outer_momentum=0.0), torch.bfloat16):
        assert sent == [SentMessage(-1, 4 * NUMEL)]
        for tensor in moved:
            expected = torch.full_like(tensor, 0.7 * 4 * 4 * 1.5 / 64)
            torch.testing.assert_close(tensor, expected, rtol=0.05, atol=0.01)
