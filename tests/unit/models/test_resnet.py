import pytest
import torch
from torch import nn

from stretto.models import ResNet, ResNetConfig, build_model
from stretto.models.resnet import Residual


@pytest.mark.parametrize(
    ("depth", "expected"),
    [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160)],
)
def test_the_number_of_parameters_is_the_published_one(depth, expected):
    with torch.device("meta"):
        model = ResNet(ResNetConfig(depth=depth, classes=1000, stem="imagenet"))
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
    for block in _blocks(model):
        x = torch.randn(2, _channels_in(block), 8, 8)
        assert torch.equal(block(x), block.shortcut(x).relu())


def test_without_zero_gamma_every_norm_begins_at_one():
    model = build_model(ResNetConfig(depth=50, width=4, zero_gamma=False), seed=0)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(norm.weight.eq(1).all() for norm in norms)


def test_the_head_begins_with_the_deviation_that_was_asked_for_and_no_bias():
    model = build_model(ResNetConfig(width=64, classes=100, head_std=0.01), seed=0)
    assert model.head.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert model.head.weight.mean().abs() < 2e-4
    assert not model.head.bias.any()


def test_uniform_weights_of_convolutions_and_head_have_the_bound_of_their_fan_in():
    model = build_model(ResNetConfig(width=64, classes=100, start="uniform"), seed=0)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for layer in layers:
        weight = layer.weight.detach()
        bound = (6 / weight[0].numel()) ** 0.5
        assert 0.98 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    small = build_model(ResNetConfig(width=64, classes=100, start="uniform", head_std=0.01), seed=0)
    assert small.head.weight.std().item() == pytest.approx(0.01, rel=0.02)


def test_initialisation_options_leave_all_other_weights_unchanged():
    plain = build_model(ResNetConfig(width=4), seed=0).state_dict()
    other = ResNetConfig(width=4, zero_gamma=False, head_std=0.01)
    changed = build_model(other, seed=0).state_dict()
    differing = {name for name in plain if not torch.equal(plain[name], changed[name])}
    last_norms = {f"blocks.{i}.branch.4.weight" for i in range(8)}
    assert differing == last_norms | {"head.weight", "head.bias"}


def test_every_norm_has_the_momentum_and_the_eps_of_the_config():
    model = build_model(ResNetConfig(width=4, norm_momentum=0.3, norm_eps=1e-3), seed=0)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {(norm.momentum, norm.eps) for norm in norms} == {(0.3, 1e-3)}


def _blocks(model):
    return [block for block in model.modules() if isinstance(block, Residual)]


def _channels_in(block):
    return block.branch[0].in_channels
