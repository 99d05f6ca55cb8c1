"""Weights of torchvision and timm under our names: every tensor is mapped, the outputs are equal.

The names of the libraries are written out here, so that the first tests need no library. The last
tests use the real libraries, where they are installed.
"""

import pytest
import torch

from stretto.errors import ConfigError
from stretto.models import ResNet, ResNetConfig, build_model
from stretto.models.backbone import from_torchvision, has_torchvision_names
from tests.unit.models.library_models import real

STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def torchvision_names(depth):
    """Return the names of a residual network's state in the order of torchvision."""
    num_convs, names = (3 if depth >= 50 else 2), ["conv1.weight", *(f"bn1.{x}" for x in NORM)]
    for stage, num_blocks in enumerate(STAGES[depth], start=1):
        for block in range(num_blocks):
            inside = f"layer{stage}.{block}"
            for k in range(1, num_convs + 1):
                names += [f"{inside}.conv{k}.weight", *(f"{inside}.bn{k}.{x}" for x in NORM)]
            if block == 0 and (stage > 1 or num_convs == 3):
                names.append(f"{inside}.downsample.0.weight")
                names += [f"{inside}.downsample.1.{x}" for x in NORM]
    return [*names, "fc.weight", "fc.bias"]


@pytest.mark.parametrize("depth", STAGES)
def test_every_tensor_is_mapped_in_the_same_order(depth):
    with torch.device("meta"):
        ours = list(ResNet(ResNetConfig(depth=depth, stem="imagenet")).state_dict())
    theirs = torchvision_names(depth)
    assert has_torchvision_names(dict.fromkeys(theirs))
    named = from_torchvision({name: name for name in theirs})
    assert list(named) == ours
    assert sorted(named.values()) == sorted(theirs)


def test_our_names_are_not_recognised_as_torchvisions():
    assert not has_torchvision_names(build_model(ResNetConfig(width=1), seed=0).state_dict())


@pytest.mark.parametrize("name", ["conv1.0.weight", "layer1.0.se.fc1.weight", "head.weight"])
def test_a_layer_without_a_counterpart_is_named(name):
    theirs = dict.fromkeys(torchvision_names(18), 0) | {name: 0}
    with pytest.raises(ConfigError, match=rf"^{name} is no tensor of a plain residual network"):
        from_torchvision(theirs)


def as_theirs(library, depth):
    """Return a library's network and ours with the same weights, with norms changed randomly."""
    if library == "timm":
        theirs = real("timm").create_model(f"resnet{depth}", pretrained=False, num_classes=10)
    else:
        theirs = real("torchvision").models.get_model(f"resnet{depth}", num_classes=10)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in theirs.state_dict().values():
            if value.dim() == 1:
                value.add_(torch.rand(value.shape, generator=generator))
    ours = build_model(ResNetConfig(depth=depth, classes=10, stem="imagenet"), seed=0)
    ours.load_state_dict(from_torchvision(theirs.state_dict()))
    return theirs, ours


@pytest.mark.parametrize("library", ["torchvision", "timm"])
@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("training", [False, True])
def test_the_same_weights_give_the_same_answers(library, depth, training):
    theirs, ours = as_theirs(library, depth)
    images = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    theirs.train(training)
    ours.train(training)
    expected = theirs(images)
    allowed = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(ours(images), expected, rtol=0, atol=allowed)
    statistics = from_torchvision(theirs.state_dict())
    torch.testing.assert_close(ours.state_dict(), statistics, rtol=1e-5, atol=1e-5)
