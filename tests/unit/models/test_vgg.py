import pytest
import torch
from torch import nn

from stretto.errors import ConfigError
from stretto.models import VGG, VGGConfig, build_model

USUAL = {
    (11, "none"): 132_863_336,
    (13, "none"): 133_047_848,
    (16, "none"): 138_357_544,
    (19, "none"): 143_667_240,
    (11, "batch"): 132_868_840,
    (13, "batch"): 133_053_736,
    (16, "batch"): 138_365_992,
    (19, "batch"): 143_678_248,
}


@pytest.mark.parametrize(("depth", "norm"), USUAL)
def test_the_number_of_parameters_is_the_usual_one(depth, norm):
    with torch.device("meta"):
        model = VGG(VGGConfig(depth=depth, norm=norm, classes=1000))
    assert sum(p.numel() for p in model.parameters()) == USUAL[depth, norm]


@pytest.mark.parametrize("depth", [11, 13, 16, 19])
def test_the_depth_is_the_number_of_layers_with_weights(depth):
    model = build_model(VGGConfig(depth=depth, size=32, width=1, hidden=2), seed=0)
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules()) == depth


@pytest.mark.parametrize("size", [32, 63, 96])
def test_the_first_linear_layer_fits_any_size(size):
    model = build_model(VGGConfig(depth=11, size=size, width=1, hidden=2), seed=0)
    assert model(torch.zeros(1, 3, size, size)).shape == (1, 8)


def test_images_of_another_size_are_refused_with_both():
    model = build_model(VGGConfig(depth=11, size=32, width=1, hidden=2), seed=0)
    with pytest.raises(ConfigError, match=r"64 by 64, model\.size is 32"):
        model(torch.zeros(1, 3, 64, 64))


def test_activations_keep_their_scale_through_nineteen_layers():
    """Without normalisation, the scale of the activations depends on the weights alone."""
    model = build_model(VGGConfig(depth=19, size=32, width=16), seed=0).eval()
    before = torch.randn(4, 3, 32, 32)
    after = model.features(before)
    assert 0.1 < after.square().mean().sqrt() / before.square().mean().sqrt() < 10
