"""FSDP2 as a peer, over a group that carries nothing: what it keeps, and when it lets go."""

import pytest
import torch
from torch import nn

from stretto.cluster.world import Mesh, World
from stretto.measure.ddp import Peers
from stretto.measure.fsdp import Settings, group_up, shard_fully
from stretto.measure.live_bytes import peak_bytes

LAYER = 64 * 64 * 4


def layers(*widths: int) -> list[nn.Module]:
    return [nn.Linear(width, 1, bias=False) for width in widths]


@pytest.mark.parametrize(
    ("widths", "least", "sizes"),
    [
        ((10, 10, 10), 0, [1, 1, 1]),
        ((10, 10, 10, 10), 80, [2, 2]),
        ((10, 10, 30, 10), 80, [2, 2]),
        ((30, 30, 1), 80, [1, 2]),  # a small one at the end joins the one before
        ((1,), 80, [1]),
        ((), 80, []),
    ],
)
def test_small_neighbours_are_joined(widths, least, sizes):
    modules = layers(*widths)
    groups = group_up(modules, least)
    assert [len(group) for group in groups] == sizes
    assert [module for group in groups for module in group] == modules


@pytest.fixture
def peers():
    with Peers(World(rank=0, mesh=Mesh((1, 1))), idle=True) as peers:
        yield peers


class Step:
    def __init__(self, model):
        self.model, self.inputs = model, torch.zeros(1, 64)

    def __call__(self):
        self.model(self.inputs).sum().backward()
        self.model.zero_grad(set_to_none=True)

    def rest(self):
        pass

    def close(self):
        pass


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))


def test_resharding_keeps_less_than_keeping_does(peers):
    def make(reshard):
        model = chain()
        return Step(shard_fully(model, [[layer] for layer in model], Settings(reshard)))

    let_go, kept = (peak_bytes(lambda r=reshard: make(r), "cpu") for reshard in (True, False))
    # Half of twelve layers and of their gradients, and a few whole ones; or all of them whole.
    assert 12 * LAYER < let_go < 16 * LAYER
    assert 18 * LAYER < kept < 24 * LAYER


def test_ddp_keeps_parameters_and_gradients_whatever_the_buckets(peers):
    def make(cap, half):
        return Step(peers.ddp(chain(), cap, half=half))

    peaks = [peak_bytes(lambda c=cap: make(c, half=False), "cpu") for cap in (1, 25)]
    assert peaks[0] == peaks[1]
    # One gradient more, on its way into its bucket.
    assert 25 * LAYER < peaks[0] < 26 * LAYER
    assert peak_bytes(lambda: make(25, half=True), "cpu") >= peaks[0]
