"""Operations counted without numbers, against sums made by hand and against a real step."""

import pytest
import torch
from torch import nn

from stretto.errors import ConfigError
from stretto.measure.estimate import (
    RATES,
    Rates,
    Subject,
    estimate_units,
    on_meta,
    parse_rates,
    seen_units,
)
from stretto.measure.profile import Sample, measure_units
from stretto.model import CNNConfig, GPTConfig, build_model, per_sample_loss
from stretto.plan.units import called_modules, find_units


def loss(model, batch):
    return per_sample_loss(model(batch[0]), batch[1]).mean()


def find(model, calls):
    return find_units(model, 0, calls)


def estimated(model, batch, rates=RATES["cpu"], using=loss):
    return estimate_units(Subject(model, using, batch, find), rates)


@pytest.mark.parametrize(
    ("rates", "forward_s"),
    [
        (Rates(1e6, 1e30), 2 * 64 * 50 * 100 / 1e6),  # two operations for each product
        (Rates(1e6, 1e6), 2 * 64 * 50 * 100 / 1e6),  # the longer of the two
        (Rates(1e30, 1e6), 4 * (64 * 50 + 50 * 100 + 64 * 100) / 1e6),  # in, weight, out
    ],
)
def test_a_product_takes_its_arithmetic_or_its_bytes(rates, forward_s):
    model = nn.Linear(50, 100, bias=False)
    (cost,) = estimated(model, (torch.ones(64, 50),), rates, lambda m, b: m(b[0]).sum())
    assert cost.forward_s == pytest.approx(forward_s)
    # The batch needs no gradient: backward is one product, and the loss, which is mostly bytes.
    assert cost.backward_s >= forward_s


def models():
    tokens = torch.randint(256, (4, 17))
    words = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    images = torch.ones(4, 3, 32, 32), torch.zeros(4, dtype=torch.long)
    for tied in (False, True):
        config = GPTConfig(blocks=2, width=32, context=16, tied=tied)
        yield pytest.param(config, words, id=f"gpt{' tied' * tied}")
    yield pytest.param(CNNConfig(), images, id="cnn")


@pytest.mark.parametrize(("config", "batch"), list(models()))
def test_units_and_their_bytes_are_those_of_a_real_step(config, batch):
    model = build_model(config, 0)
    sample = Sample(lambda: loss(model, batch), batch)
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
    most = max(c.workspace_bytes for c in costs)
    assert most == pytest.approx(max(c.workspace_bytes for c in real), rel=0.5, abs=kept / 20)
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_twice_the_batch_takes_about_twice_as_long():
    model = build_model(GPTConfig(blocks=2, width=32, context=16), 0)
    once, twice = (
        sum(c.forward_s + c.backward_s for c in estimated(model, (tokens, tokens)))
        for tokens in (torch.zeros(8, 16, dtype=torch.long), torch.zeros(16, 16, dtype=torch.long))
    )
    assert 1.6 * once < twice < 2.1 * once


def test_tensors_that_are_one_stay_one_and_nothing_is_copied():
    model = build_model(GPTConfig(blocks=1, width=32, tied=True), 0)
    model.note = torch.ones(3)
    copied = on_meta(model)
    assert copied.head.weight is copied.tokens.weight
    assert copied.note.is_meta
    assert all(p.is_meta and p.requires_grad for p in copied.parameters())
    frozen = on_meta(nn.Linear(2, 2).requires_grad_(False))
    assert not frozen.weight.requires_grad


class Looks(nn.Module):
    """Looks at numbers, as models do that route or skip."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) if x.sum().item() > 0 else x


class Asks(nn.Module):
    """Leaves a mask out that hides nothing, as the models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        hidden = torch.zeros(x.shape, device=x.device)
        if not (hidden == 0).all():
            raise AssertionError("a mask of zeros hides nothing")
        return self.layer(x)


def test_a_model_that_asks_whether_it_may_leave_something_out_is_told_yes():
    (unit,) = estimated(Asks(), (torch.ones(2, 4), torch.zeros(2, dtype=torch.long)))
    assert unit.numel == 20
    assert unit.forward_s > 0


class Repeats(Asks):
    """Goes on until something no longer holds."""

    def forward(self, x):
        while (x < 1).any():
            x = x + 1
        return self.layer(x)


def test_a_model_that_asks_without_end_is_told_to_be_measured():
    with pytest.raises(ConfigError, match=r"without end.*measure it"):
        estimated(Repeats(), (torch.ones(2, 4), torch.zeros(2, dtype=torch.long)))


def test_a_model_that_needs_numbers_is_told_to_be_measured():
    with pytest.raises(ConfigError, match=r"cannot be estimated.*measure it") as told:
        estimated(Looks(), (torch.ones(2, 4),), using=lambda m, b: m(b[0]).sum())
    assert "\n" not in str(told.value)


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
def test_rates_that_are_none_are_told(text):
    with pytest.raises(ConfigError, match="h200 fp32"):
        parse_rates(text)


def test_rates_are_named_or_given():
    assert parse_rates("h200") is RATES["h200"]
    assert parse_rates("3e14, 2e12") == Rates(3e14, 2e12)


def test_units_and_calls_are_seen_without_numbers():
    model = build_model(GPTConfig(blocks=2, width=32, context=8), seed=0)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    units, calls = seen_units(Subject(model, loss, (tokens, tokens), find))
    assert [unit.shape for unit in units] == [
        unit.shape for unit in find(model, called_modules(model, lambda: model(tokens)))
    ]
    assert set(calls) >= {"blocks.0", "blocks.1"}
    assert all(parameter.is_meta for unit in units for parameter in unit.parameters)


def test_a_model_that_needs_numbers_is_not_seen():
    def reads(model, batch):
        return model(batch[0]).sum() * float(batch[0].sum())

    subject = Subject(nn.Linear(2, 2), reads, (torch.ones(1, 2),), find)
    with pytest.raises(ConfigError, match="does not run on tensors without numbers"):
        seen_units(subject)
