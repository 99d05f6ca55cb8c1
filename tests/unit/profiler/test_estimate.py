"""Estimates from meta tensors, compared with sums made by hand and with a real step."""

import pytest
import torch
from torch import nn

from stretto.errors import ConfigError
from stretto.models import CNNConfig, GPTConfig, build_model, per_sample_loss
from stretto.planner.model_units import called_modules, find_units
from stretto.profiler.estimate import (
    DEVICE_RATES,
    DeviceRates,
    ModelToEstimate,
    estimate_units,
    parse_rates,
    to_meta,
    trace_units,
)
from stretto.profiler.measure_units import SampleStep, measure_units


def loss(model, batch):
    return per_sample_loss(model(batch[0]), batch[1]).mean()


def find(model, calls):
    return find_units(model, 0, calls)


def estimated(model, batch, rates=DEVICE_RATES["cpu"], using=loss):
    return estimate_units(ModelToEstimate(model, using, batch, find), rates)


@pytest.mark.parametrize(
    ("rates", "forward_s"),
    [
        (DeviceRates(1e6, 1e30), 2 * 64 * 50 * 100 / 1e6),  # two operations for each product
        (DeviceRates(1e6, 1e6), 2 * 64 * 50 * 100 / 1e6),  # the longer of the two
        (DeviceRates(1e30, 1e6), 4 * (64 * 50 + 50 * 100 + 64 * 100) / 1e6),  # in, weight, out
    ],
)
def test_a_matrix_product_takes_the_longer_of_arithmetic_and_memory_time(rates, forward_s):
    model = nn.Linear(50, 100, bias=False)
    (cost,) = estimated(model, (torch.ones(64, 50),), rates, lambda m, b: m(b[0]).sum())
    assert cost.forward_s == pytest.approx(forward_s)
    # The batch needs no gradient: backward is one product, and the loss, which is mostly bytes.
    assert cost.backward_s >= forward_s


def models():
    tokens = torch.randint(256, (4, 17))
    text = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    images = torch.ones(4, 3, 32, 32), torch.zeros(4, dtype=torch.long)
    for tied in (False, True):
        config = GPTConfig(blocks=2, width=32, context=16, tied=tied)
        yield pytest.param(config, text, id=f"gpt{' tied' * tied}")
    yield pytest.param(CNNConfig(), images, id="cnn")


@pytest.mark.parametrize(("config", "batch"), list(models()))
def test_estimated_units_and_bytes_match_a_real_step(config, batch):
    model = build_model(config, 0)
    sample = SampleStep(lambda: loss(model, batch), batch)
    with torch.no_grad():
        calls = called_modules(model, sample.forward)
    real = measure_units(model, find(model, calls), sample, repeats=1)
    costs = estimated(model, batch)
    for figure in ("name", "numel", "tensors", "used_often", "input_bytes"):
        assert [getattr(c, figure) for c in costs] == [getattr(c, figure) for c in real]
    for cost, seen in zip(costs, real, strict=True):
        assert cost.activation_bytes == pytest.approx(seen.activation_bytes, rel=0.02, abs=5000)
        assert cost.forward_s > 0 or cost.used_often
    kept = sum(cost.activation_bytes for cost in real)
    peak = max(c.workspace_bytes for c in costs)
    assert peak == pytest.approx(max(c.workspace_bytes for c in real), rel=0.5, abs=kept / 20)
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_twice_the_batch_takes_about_twice_as_long():
    model = build_model(GPTConfig(blocks=2, width=32, context=16), 0)
    once, twice = (
        sum(c.forward_s + c.backward_s for c in estimated(model, (tokens, tokens)))
        for tokens in (torch.zeros(8, 16, dtype=torch.long), torch.zeros(16, 16, dtype=torch.long))
    )
    assert 1.6 * once < twice < 2.1 * once


def test_a_meta_copy_keeps_shared_tensors_shared():
    model = build_model(GPTConfig(blocks=1, width=32, tied=True), 0)
    model.record = torch.ones(3)
    copied = to_meta(model)
    assert copied.head.weight is copied.tokens.weight
    assert copied.record.is_meta
    assert all(p.is_meta and p.requires_grad for p in copied.parameters())
    frozen = to_meta(nn.Linear(2, 2).requires_grad_(False))
    assert not frozen.weight.requires_grad


class ReadsValues(nn.Module):
    """Reads the value of a tensor, as models do that route or skip."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) if x.sum().item() > 0 else x


class ChecksMask(nn.Module):
    """Skips a mask that hides nothing, as the models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        hidden = torch.zeros(x.shape, device=x.device)
        if not (hidden == 0).all():
            raise AssertionError("a mask of zeros hides nothing")
        return self.layer(x)


def test_a_condition_on_meta_tensors_counts_as_true():
    (unit,) = estimated(ChecksMask(), (torch.ones(2, 4), torch.zeros(2, dtype=torch.long)))
    assert unit.numel == 20
    assert unit.forward_s > 0


class Repeats(ChecksMask):
    """Loops until a condition no longer holds."""

    def forward(self, x):
        while (x < 1).any():
            x = x + 1
        return self.layer(x)


def test_an_endless_loop_on_meta_tensors_is_an_error(monkeypatch):
    monkeypatch.setattr("stretto.profiler.estimate.MAX_ANSWERS", 500)
    with pytest.raises(ConfigError, match=r"without end.*measure it"):
        estimated(Repeats(), (torch.ones(2, 4), torch.zeros(2, dtype=torch.long)))


def test_a_model_that_reads_values_cannot_be_estimated():
    with pytest.raises(ConfigError, match=r"cannot be estimated.*measure it") as raised:
        estimated(ReadsValues(), (torch.ones(2, 4),), using=lambda m, b: m(b[0]).sum())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_keeps_no_matrix_of_scores(masked):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 48)

        def forward(self, x):
            parts = self.layer(x).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, dim=-1)
            mask = torch.ones(256, 256, dtype=torch.bool, device=x.device) if masked else None
            return nn.functional.scaled_dot_product_attention(*parts, mask)

    (cost,) = estimated(Attends(), (torch.ones(1, 256, 16),), using=lambda m, b: m(b[0]).sum())
    scores = 4 * 2 * 256 * 256
    assert cost.activation_bytes < scores * (0.7 if masked else 0.2)


@pytest.mark.parametrize("text", ["a100", "1e9", "1e9,x", "0,1", "1e9,1e9,1e9", "-1,1"])
def test_invalid_rates_are_refused_with_the_known_devices(text):
    with pytest.raises(ConfigError, match="h200 fp32"):
        parse_rates(text)


def test_rates_are_those_of_a_device_or_two_numbers():
    assert parse_rates("h200") is DEVICE_RATES["h200"]
    assert parse_rates("3e14, 2e12") == DeviceRates(3e14, 2e12)


def test_units_and_called_modules_are_found_on_meta_tensors():
    model = build_model(GPTConfig(blocks=2, width=32, context=8), seed=0)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    units, calls = trace_units(ModelToEstimate(model, loss, (tokens, tokens), find))
    assert [unit.shape for unit in units] == [
        unit.shape for unit in find(model, called_modules(model, lambda: model(tokens)))
    ]
    assert set(calls) >= {"blocks.0", "blocks.1"}
    assert all(parameter.is_meta for unit in units for parameter in unit.parameters)


def test_units_of_a_model_that_reads_values_cannot_be_found():
    def loss_of_values(model, batch):
        return model(batch[0]).sum() * float(batch[0].sum())

    target = ModelToEstimate(nn.Linear(2, 2), loss_of_values, (torch.ones(1, 2),), find)
    with pytest.raises(ConfigError, match="does not run on meta tensors"):
        trace_units(target)
