"""Memory of FSDP2 and DDP as peers, over a fake process group."""

import pytest
import torch
from torch import nn

from stretto.bench.fsdp2 import FsdpSettings, apply_fully_shard, group_modules
from stretto.bench.peers import PeerProcessGroup
from stretto.cluster.world import Mesh, World
from stretto.profiler.meters import peak_bytes

LAYER = 64 * 64 * 4


def layers(*widths: int) -> list[nn.Module]:
    return [nn.Linear(width, 1, bias=False) for width in widths]


@pytest.mark.parametrize(
    ("widths", "least", "sizes"),
    [
        ((10, 10, 10), 0, [1, 1, 1]),
        ((10, 10, 10, 10), 80, [2, 2]),
        ((10, 10, 30, 10), 80, [2, 2]),
        ((30, 30, 1), 80, [1, 2]),  # a small group at the end joins the one before
        ((1,), 80, [1]),
        ((), 80, []),
    ],
)
def test_small_consecutive_modules_are_joined(widths, least, sizes):
    modules = layers(*widths)
    groups = group_modules(modules, least)
    assert [len(group) for group in groups] == sizes
    assert [module for group in groups for module in group] == modules


@pytest.fixture
def peers():
    with PeerProcessGroup(World(rank=0, mesh=Mesh((1, 1))), fake=True) as peers:
        yield peers


class Step:
    def __init__(self, model):
        self.model, self.inputs = model, torch.zeros(1, 64)

    def __call__(self):
        self.model(self.inputs).sum().backward()
        self.model.zero_grad(set_to_none=True)

    def drain(self):
        pass

    def close(self):
        pass


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))


def test_resharding_takes_less_memory(peers):
    def make(reshard):
        model = chain()
        return Step(apply_fully_shard(model, [[layer] for layer in model], FsdpSettings(reshard)))

    resharded, kept = (peak_bytes(lambda r=reshard: make(r), "cpu") for reshard in (True, False))
    # Half of twelve layers and their gradients, and a few whole layers; or all layers whole.
    assert 12 * LAYER < resharded < 16 * LAYER
    assert 18 * LAYER < kept < 24 * LAYER


def test_ddp_keeps_parameters_and_gradients_for_any_bucket_size(peers):
    def make(cap, half):
        return Step(peers.ddp(chain(), cap, half=half))

    peaks = [peak_bytes(lambda c=cap: make(c, half=False), "cpu") for cap in (1, 25)]
    assert peaks[0] == peaks[1]
    # One more gradient, before it is copied into its bucket.
    assert 25 * LAYER < peaks[0] < 26 * LAYER
    assert peak_bytes(lambda: make(25, half=True), "cpu") >= peaks[0]
