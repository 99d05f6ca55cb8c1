"""Communication overlaps with backward: sleeps stand for compute and for the link."""

import time

import pytest
import torch
from torch import nn

from stretto.comm.in_process_transports import EmulatedLink, run_threads
from stretto.strategies import AllReduceConfig, build_strategy

pytestmark = pytest.mark.timed

FORWARD_S, BACKWARD_S = 0.02, 0.05
LAYERS, WIDTH = 4, 64
LR = 0.01
LAYER_BYTES = WIDTH * WIDTH * 4


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(BACKWARD_S)
        return grad.clone()


class Layer(nn.Module):
    """A linear layer whose compute takes a known time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return _Sleep.apply(self.linear(x))


def step_s(algorithm: str, bytes_per_s: float) -> float:
    """Return the time of a step of the slower of two ranks, with a bucket for each layer.

    Each update must be made with sums over both ranks: incomplete buckets would be quick, too.
    """

    def work(transport):
        link = EmulatedLink(transport, latency_s=0.0, bytes_per_s=bytes_per_s)
        strategy = build_strategy(
            AllReduceConfig(algorithm=algorithm, bucket_bytes=LAYER_BYTES), link
        )
        torch.manual_seed(0)
        model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        model, optimizer = strategy.attach(model, lambda p: torch.optim.SGD(p, lr=LR))
        times = []
        for step in range(3):
            expected = updated_weights(model)
            start_s = time.perf_counter()
            strategy.begin(step, 0, True, LR)
            model(inputs_of(transport.rank)).sum().backward()
            strategy.after_backward()
            times.append(time.perf_counter() - start_s)
            optimizer.step()
            optimizer.zero_grad()
            for layer, weight in zip(model, expected, strict=True):
                torch.testing.assert_close(layer.linear.weight.detach(), weight)
        strategy.close()
        return min(times[1:])

    return max(run_threads(2, work))


def inputs_of(rank):
    return torch.linspace(-1, 1 + rank, WIDTH).unsqueeze(0)


def updated_weights(model):
    """Return the weights after a step of one process that has the inputs of both ranks."""
    weights = [layer.linear.weight.detach().clone().requires_grad_() for layer in model]
    values = torch.cat([inputs_of(rank) for rank in range(2)])
    for weight in weights:
        values = values @ weight.T
    values.sum().backward()
    return [(weight - LR * weight.grad).detach() for weight in weights]


@pytest.mark.parametrize(
    "algorithm", ["native", "ring", "doubling", "halving-doubling", "hierarchical"]
)
@pytest.mark.parametrize("comm_share", [0.5, 1.0, 2.0], ids=["fast link", "even", "slow link"])
def test_a_step_is_forward_plus_the_longer_of_backward_and_communication_plus_one_bucket(
    algorithm, comm_share
):
    bucket_s = BACKWARD_S * comm_share
    # On two ranks, each algorithm sends 2 (n-1)/n = 1 times the bucket over each link.
    measured_s = step_s(algorithm, bytes_per_s=LAYER_BYTES / bucket_s)
    forward_s, backward_s, comm_s = (LAYERS * s for s in (FORWARD_S, BACKWARD_S, bucket_s))
    # The first bucket waits for the backward of the last layer, the last bucket for all of it.
    one_bucket_s = max(bucket_s, BACKWARD_S)
    allowed_s = (forward_s + max(backward_s, comm_s) + one_bucket_s) * 1.1
    assert measured_s <= allowed_s
    assert allowed_s < forward_s + backward_s + comm_s, "the bound must tell overlap from none"
