import pytest
import torch
from torch import nn

from stretto.model import ResNetConfig, build_model
from stretto.model.resnet import Residual


@pytest.mark.parametrize(
    ("depth", "expected"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)]
)
def test_the_number_of_parameters_is_the_published_one(depth, expected):
    config = ResNetConfig(depth=depth, classes=1000, stem="imagenet")
    model = build_model(config, seed=0)
    assert sum(p.numel() for p in model.parameters()) == expected


@pytest.mark.parametrize(("stem", "side"), [("imagenet", 2), ("small", 8)])
def test_the_stem_decides_how_small_the_last_stage_is(stem, side):
    model = build_model(ResNetConfig(stem=stem, width=4), seed=0)
    assert model.blocks(model.stem(torch.zeros(1, 3, 64, 64))).shape == (1, 32, side, side)


def test_a_bottleneck_has_its_stride_in_the_three_by_three_convolution():
    model = build_model(ResNetConfig(depth=50, width=4), seed=0)
    convs = [m for b in model.blocks for m in b.branch if isinstance(m, nn.Conv2d)]
    assert {c.kernel_size for c in convs if c.stride == (2, 2)} == {(3, 3)}


@pytest.mark.parametrize("depth", [18, 50])
def test_every_block_begins_as_its_shortcut(depth):
    model = build_model(ResNetConfig(depth=depth, width=4), seed=0)
    for block in model.modules():
        if isinstance(block, Residual):
            x = torch.randn(2, _channels_in(block), 8, 8)
            assert torch.equal(block(x), block.shortcut(x).relu())


def _channels_in(block):
    return block.branch[0].in_channels
