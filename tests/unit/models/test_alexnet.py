import pytest
import torch
from torch import nn

from stretto.errors import ConfigError
from stretto.models import AlexNet, AlexNetConfig, build_model

SMALL = {"size": 63, "width": 2, "hidden": 8}


@pytest.mark.parametrize(("norm", "expected"), [("none", 61_100_840), ("pool5", 61_101_352)])
def test_the_number_of_parameters_is_the_usual_one_and_a_norms(norm, expected):
    with torch.device("meta"):
        model = AlexNet(AlexNetConfig(classes=1000, norm=norm))
    assert sum(p.numel() for p in model.parameters()) == expected


def test_the_norm_comes_right_after_the_last_pooling():
    model = build_model(AlexNetConfig(**SMALL), seed=0)
    kinds = [type(layer) for layer in model.features]
    assert kinds[-2:] == [nn.MaxPool2d, nn.BatchNorm2d]
    assert kinds.count(nn.BatchNorm2d) == 1


def test_images_of_224_end_as_maps_of_six_by_six():
    model = build_model(AlexNetConfig(width=1, hidden=2), seed=0).eval()
    images = torch.zeros(1, 3, 224, 224)
    assert model.features(images).shape == (1, 4, 6, 6)
    assert model(images).shape == (1, 8)


@pytest.mark.parametrize("size", [63, 64, 96, 160, 227])
def test_the_first_linear_layer_fits_any_size(size):
    model = build_model(AlexNetConfig(size=size, width=1, hidden=2), seed=0).eval()
    assert model(torch.zeros(1, 3, size, size)).shape == (1, 8)


def test_images_of_another_size_are_refused_with_both():
    model = build_model(AlexNetConfig(**SMALL), seed=0)
    with pytest.raises(ConfigError, match=r"96 by 80, model\.size is 63: set data\.size=63"):
        model(torch.zeros(1, 3, 96, 80))


def test_dropout_acts_in_training_only():
    model = build_model(AlexNetConfig(**SMALL | {"hidden": 64}), seed=0)
    images = torch.randn(4, 3, 63, 63)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))
