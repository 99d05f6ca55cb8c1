"""Our ResNets on a GPU against those of timm and torchvision: same weights, same outputs."""

import pytest
import torch

from tests.unit.models.test_names import as_theirs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # the libraries warn about themselves
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

TOLERANCE = 1e-5
"""Tolerance of float32, relative to the largest output. Other kernels may be chosen, which sum in
another order. TensorFloat-32, with its ten bits, would miss it by two orders of magnitude."""


@pytest.fixture(autouse=True)
def whole_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("training", [False, True])
def test_the_same_weights_give_the_same_answers_and_gradients(library, depth, training):
    theirs, ours = (model.train(training).cuda() for model in as_theirs(library, depth))
    images = torch.randn(16, 3, 224, 224, generator=torch.Generator().manual_seed(0)).cuda()
    expected, found = theirs(images), ours(images)
    allowed = TOLERANCE * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=allowed)
    for logits in (expected, found):
        logits.square().mean().backward()
    gradient = theirs.conv1.weight.grad
    allowed = (
        100 * TOLERANCE * gradient.abs().max().item()
    )  # a gradient is a sum over all positions and layers
    torch.testing.assert_close(ours.stem[0].weight.grad, gradient, rtol=0, atol=allowed)
