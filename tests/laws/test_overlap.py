"""Communication goes on beside backward: shown with sleeps for compute and for the link."""

import time

import pytest
import torch
from torch import nn

from stretto.comm.emulated import EmulatedLink
from stretto.comm.local import run_local
from stretto.strategy import AllReduceConfig, build_strategy

pytestmark = pytest.mark.timed

FORWARD_S, BACKWARD_S = 0.02, 0.05
LAYERS, WIDTH = 6, 64
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
    """Return the time of one step on two ranks, a bucket per layer, the slower rank's."""

    def work(channel):
        link = EmulatedLink(channel, latency_s=0.0, bytes_per_s=bytes_per_s)
        strategy = build_strategy(AllReduceConfig(algorithm=algorithm, fusion=LAYER_BYTES), link)
        model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        model, optimizer = strategy.attach(model, lambda p: torch.optim.SGD(p, lr=0.01))
        times = []
        for step in range(3):
            start_s = time.perf_counter()
            strategy.begin(step, 0, True, 0.01)
            model(torch.ones(1, WIDTH)).sum().backward()
            strategy.after_backward()
            times.append(time.perf_counter() - start_s)
            optimizer.step()
            optimizer.zero_grad()
        strategy.close()
        return min(times[1:])

    return max(run_local(2, work))


@pytest.mark.parametrize(
    "algorithm", ["native", "ring", "doubling", "halving-doubling", "hierarchical"]
)
@pytest.mark.parametrize("comm_share", [0.5, 1.0, 2.0], ids=["fast link", "even", "slow link"])
def test_a_step_is_forward_plus_the_longer_of_backward_and_communication_plus_one_bucket(
    algorithm, comm_share
):
    bucket_s = BACKWARD_S * comm_share
    # Two ranks: each of these carries 2 (n-1)/n = 1 times the bucket over each link.
    measured_s = step_s(algorithm, bytes_per_s=LAYER_BYTES / bucket_s)
    forward_s, backward_s, comm_s = (LAYERS * s for s in (FORWARD_S, BACKWARD_S, bucket_s))
    # The first bucket cannot leave before the last layer's backward, the last one not before all.
    one_bucket_s = max(bucket_s, BACKWARD_S)
    allowed_s = (forward_s + max(backward_s, comm_s) + one_bucket_s) * 1.1
    assert measured_s <= allowed_s
    assert allowed_s < forward_s + backward_s + comm_s, "the bound must tell overlap from none"
