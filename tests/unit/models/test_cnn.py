import pytest
import torch
from torch import nn

from stretto.models import CNNConfig, build_model


@pytest.mark.parametrize(
    ("norm", "kind"), [("batch", nn.BatchNorm2d), ("group", nn.GroupNorm), ("none", None)]
)
def test_norm_chooses_the_normalisation(norm, kind):
    modules = list(build_model(CNNConfig(norm=norm), seed=0).modules())
    found = {type(m) for m in modules if isinstance(m, (nn.BatchNorm2d, nn.GroupNorm))}
    assert found == ({kind} if kind else set())


@pytest.mark.parametrize("width", [1, 6, 16])
def test_group_norm_takes_any_width(width):
    model = build_model(CNNConfig(width=width, norm="group"), seed=0)
    assert model(torch.zeros(1, 3, 16, 16)).shape == (1, 8)


@pytest.mark.parametrize("size", [8, 31, 64])
def test_images_of_any_size_will_do(size):
    assert build_model(CNNConfig(classes=5), seed=0)(torch.zeros(2, 3, size, size)).shape == (2, 5)


@pytest.mark.parametrize("norm", ["none", "group"])
def test_without_batch_statistics_samples_do_not_see_each_other(norm):
    model = build_model(CNNConfig(norm=norm), seed=0).double()
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    one_by_one = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(images), one_by_one, rtol=1e-12, atol=1e-12)
