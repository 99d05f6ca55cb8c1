"""Optimizer steps on a GPU: the host never waits, and the results are those of the CPU."""

import pytest
import torch

from stretto.models import ResNetConfig, build_model
from stretto.optim import AdamConfig, AdamWConfig, LAMBConfig, LARSConfig, SGDConfig, make_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

CONFIGS = [
    SGDConfig(weight_decay=1e-4),
    SGDConfig(order="inside", momentum_correction=True, weight_decay=1e-4),
    LARSConfig(weight_decay=1e-4),
    LAMBConfig(weight_decay=1e-2),
    AdamConfig(weight_decay=1e-4),
    AdamWConfig(weight_decay=1e-2),
]


def stepped(config, device, *, quiet):
    """Return the weights of a ResNet after three steps with gradients drawn on the CPU."""
    torch.manual_seed(0)
    model = build_model(ResNetConfig(width=8), seed=0).to(device)
    optimizer = make_optimizer(config, model)(model.parameters())
    parameters = list(model.parameters())
    for step in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape).to(device)
        optimizer.param_groups[0]["lr"] = config.lr * (step + 1) / 3
        torch.cuda.set_sync_debug_mode("error" if quiet and step else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return torch.cat([p.detach().cpu().flatten() for p in parameters])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_a_step_never_waits_for_the_device_and_equals_the_cpus(config):
    on_gpu = stepped(config, "cuda", quiet=True)
    torch.testing.assert_close(on_gpu, stepped(config, "cpu", quiet=False), rtol=1e-4, atol=1e-5)
