"""How models are divided into units: which modules are joined, split or refused."""

import pytest
import torch
from torch import nn

from stretto.errors import ConfigError
from stretto.models import VGG, GPTConfig, ResNet, ResNetConfig, VGGConfig, build_model
from stretto.planner.model_units import called_modules, find_units


def names(units):
    return [unit.name for unit in units]


def covers(model, units):
    """Return whether every trainable parameter is in exactly one unit, under its own name."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    pairs = [pair for u in units for pair in zip(u.names, u.parameters, strict=True)]
    return len(pairs) == len(trainable) and all(trainable[name] is p for name, p in pairs)


def gpt(*, tied):
    config = GPTConfig(vocab=11, context=6, width=8, blocks=3, heads=2, tied=tied, dropout=0.0)
    return build_model(config, 0)


def test_a_gpt_is_its_embeddings_its_blocks_and_its_head():
    model = gpt(tied=False)
    units = find_units(model)
    assert names(units) == ["tokens+positions", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    assert covers(model, units)
    assert not any(unit.used_often for unit in units)


def test_a_tied_weight_belongs_to_its_first_user_and_is_used_often():
    model = gpt(tied=True)
    units = find_units(model)
    assert names(units) == ["tokens+positions", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert covers(model, units)
    assert [unit.used_often for unit in units] == [True, False, False, False, False]
    assert [unit.shape.used_often for unit in units] == [unit.used_often for unit in units]
    assert not any(unit.always_active for unit in units)


def test_a_resnet_50_is_its_stem_its_blocks_and_its_head():
    with torch.device("meta"):
        model = ResNet(ResNetConfig(depth=50, classes=1000, stem="imagenet"))
    units = find_units(model)
    assert names(units) == ["stem.0", "stem.1", *(f"blocks.{i}" for i in range(16)), "head"]
    assert covers(model, units)
    assert sum(unit.numel for unit in units) == 25_557_032


def test_a_vgg_is_its_layers_and_small_ones_are_joined_in_order():
    with torch.device("meta"):
        model = VGG(VGGConfig())
    assert len(find_units(model)) == 16
    units = find_units(model, 250_000)
    assert names(units)[0] == "features.0+features.2+features.5+features.7"
    assert names(units)[-2:] == ["hidden.0", "hidden.3+head"]  # the last one has no neighbour after
    assert covers(model, units)
    assert all(unit.numel >= 250_000 for unit in units)


class Scaled(nn.Module):
    """A model with a direct parameter beside two layers."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.two(self.one(x) * self.scale)


def test_direct_parameters_of_the_root_are_an_always_active_unit():
    units = find_units(Scaled())
    assert names(units) == ["Scaled", "one", "two"]
    assert units[0].names == ("scale",)
    assert [(u.always_active, u.used_often) for u in units] == [
        (True, True),
        (False,) * 2,
        (False,) * 2,
    ]
    joined = find_units(Scaled(), 1000)
    assert names(joined) == ["Scaled", "one+two"]
    assert [(u.always_active, u.used_often) for u in joined] == [(True, True), (False, False)]


def test_a_module_without_children_is_one_unit():
    units = find_units(nn.Linear(3, 2))
    assert [(u.name, u.numel, u.always_active) for u in units] == [("Linear", 8, False)]


class Deep(nn.Module):
    """All layers lie in a body, as in most libraries."""

    def __init__(self):
        super().__init__()
        self.body = nn.Module()
        self.body.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.body.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)


def test_a_module_that_holds_most_of_the_model_is_split():
    expected = [*(f"body.layers.{i}" for i in range(3)), "body.norm", "head"]
    assert names(find_units(Deep())) == expected


def test_frozen_parameters_and_empty_ones_are_in_no_unit():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].requires_grad_(False)
    model[2].bias = nn.Parameter(torch.empty(0))
    units = find_units(model)
    assert [unit.names for unit in units] == [("0.weight", "0.bias"), ("2.weight",)]


def test_neighbours_of_different_types_are_not_joined():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2).double())
    assert names(find_units(model, 1000)) == ["0", "1+2"]


def test_a_unit_of_two_types_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias = nn.Parameter(model[1].bias.detach().half())
    with pytest.raises(ConfigError, match=r"1\.weight is torch\.float32 .* 1\.bias torch\.float16"):
        find_units(model)


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="no trainable parameter: there is nothing to shard"):
        find_units(nn.Linear(2, 2).requires_grad_(False))


class Backwards(nn.Module):
    """Registered in one order, called in another; a norm whose weight is only read."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(6, 2), nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) * self.norm.weight)


def test_units_have_the_order_in_which_a_forward_calls_them():
    model = Backwards()
    calls = called_modules(model, lambda: model(torch.ones(1, 4)))
    assert calls == ("", "first", "last")
    assert names(find_units(model)) == ["last", "first", "norm"]
    units = find_units(model, calls=calls)
    assert names(units) == ["norm", "first", "last"]
    assert covers(model, units)


def test_a_module_that_is_only_read_belongs_to_the_module_around_it():
    model = Backwards()
    calls = called_modules(model, lambda: model(torch.ones(1, 4)))
    norm = find_units(model, calls=calls)[0]
    assert norm.modules == (model,)
    assert norm.always_active
    assert norm.used_often


def test_no_hook_is_left_after_a_forward_even_if_it_fails():
    model = Backwards()
    with pytest.raises(RuntimeError):
        called_modules(model, lambda: model(torch.ones(1, 5)))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_last_unit_is_split_if_the_calls_are_known():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)))
    calls = called_modules(model, lambda: model(torch.ones(1, 8)))
    least = 2 * 72
    assert names(find_units(model, least)) == ["0.0+0.1", "1.0+1.1", "2.0+2.1"]
    assert names(find_units(model, least, calls)) == ["0.0+0.1", "1.0+1.1", "2.0", "2.1"]
