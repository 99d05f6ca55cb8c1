import json

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from stretto.checkpoint import (
    CheckpointState,
    flatten_optimizer,
    load_checkpoint,
    restore_optimizer_,
    save_checkpoint,
)
from stretto.errors import CheckpointError
from tests.unit.checkpoint.saver import bits

OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd with momentum": lambda p: SGD(p, lr=1 / 3, momentum=0.9, nesterov=True),
    "adam": lambda p: Adam(p, lr=1e-3, betas=(0.9, 0.95)),
    "adam with amsgrad": lambda p: Adam(p, amsgrad=True, foreach=False),
    "adamw with a tensor rate": lambda p: AdamW(p, lr=torch.tensor(1e-3), foreach=False),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
    "rmsprop": lambda p: RMSprop(p, momentum=0.5, centered=True),
}


def small_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)


def train(model, optimizer, steps):
    for step in range(steps):
        inputs = torch.full((2, 3), 0.1 * step + 0.3, dtype=next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()


def named(model):
    return dict(model.named_parameters())


def two_groups(model):
    return [
        {"params": model[0].parameters(), "lr": 0.3},
        {"params": model[2].parameters(), "weight_decay": 0.01},
    ]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resuming_from_a_checkpoint_equals_never_having_stopped(tmp_path, kind):
    model = small_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, 3)
    tensors, facts = flatten_optimizer(optimizer, named(model))
    weights = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    prefixed = {f"optimizer/{name}": tensor for name, tensor in tensors.items()}
    path = save_checkpoint(
        tmp_path / "c", CheckpointState(3, weights | prefixed, {"optimizer": facts}), generation=0
    )
    train(model, optimizer, 3)

    again = small_model()
    state = load_checkpoint(path.path)
    again.load_state_dict(state.tensors_under("model"))
    new = OPTIMIZERS[kind](again.parameters())
    restore_optimizer_(
        new, named(again), state.tensors_under("optimizer"), state.facts["optimizer"]
    )
    train(again, new, 3)
    assert [bits(p) for p in again.parameters()] == [bits(p) for p in model.parameters()]


def test_state_keeps_its_type_if_the_parameter_has_another():
    model = small_model(torch.bfloat16)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    weight = model[0].weight
    optimizer.state[weight]["momentum_buffer"] = torch.full_like(weight, 1 / 3, dtype=torch.float32)
    tensors, facts = flatten_optimizer(optimizer, named(model))
    new = SGD(model.parameters(), lr=0.1, momentum=0.9)
    restore_optimizer_(new, named(model), tensors, facts)
    restored = new.state[weight]["momentum_buffer"]
    assert bits(restored) == bits(optimizer.state[weight]["momentum_buffer"])


def test_none_and_numbers_in_the_state_are_restored():
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    own = {"momentum_buffer": None, "count": 3, "scale": 0.1 + 0.2, "seen": True, "empty": []}
    optimizer.state[model[0].weight] = own
    optimizer.state[model[0].bias] = {}
    tensors, facts = flatten_optimizer(optimizer, named(model))
    new = SGD(model.parameters(), lr=0.5)
    restore_optimizer_(new, named(model), tensors, json.loads(json.dumps(facts)))
    assert dict(new.state) == {model[0].weight: own, model[0].bias: {}}


def test_options_of_groups_are_restored_with_tuples_as_tuples():
    model = small_model()
    optimizer = Adam(two_groups(model), betas=(0.1, 0.2), eps=1 / 3)
    optimizer.param_groups[1]["initial_lr"] = 0.7
    tensors, facts = flatten_optimizer(optimizer, named(model))
    new = Adam(two_groups(model))
    restore_optimizer_(new, named(model), tensors, json.loads(json.dumps(facts)))
    assert [{**group, "params": None} for group in new.param_groups] == [
        {**group, "params": None} for group in optimizer.param_groups
    ]


def test_an_option_missing_in_the_checkpoint_keeps_its_value():
    model = small_model()
    tensors, facts = flatten_optimizer(SGD(model.parameters(), lr=0.1), named(model))
    del facts["groups"][0]["values"]["nesterov"]
    new = SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    restore_optimizer_(new, named(model), tensors, facts)
    assert new.param_groups[0]["nesterov"] is True
    assert new.param_groups[0]["lr"] == 0.1


def test_the_restored_optimizer_shares_no_memory_with_the_checkpoint():
    model = small_model()
    optimizer = Adam(model.parameters())
    train(model, optimizer, 1)
    tensors, facts = flatten_optimizer(optimizer, named(model))
    kept = {name: bits(tensor) for name, tensor in tensors.items()}
    again = small_model()
    new = Adam(again.parameters())
    restore_optimizer_(new, named(again), tensors, facts)
    train(again, new, 2)
    assert {name: bits(tensor) for name, tensor in tensors.items()} == kept


def test_the_order_of_parameters_in_a_group_does_not_matter():
    model = small_model()
    optimizer = Adam(model.parameters())
    train(model, optimizer, 2)
    tensors, facts = flatten_optimizer(optimizer, named(model))
    new = Adam(reversed(list(model.parameters())))
    restore_optimizer_(new, named(model), tensors, facts)
    for parameter in model.parameters():
        assert bits(new.state[parameter]["exp_avg"]) == bits(optimizer.state[parameter]["exp_avg"])


def trained_adam():
    model = small_model()
    optimizer = Adam(model.parameters())
    train(model, optimizer, 1)
    return model, *flatten_optimizer(optimizer, named(model))


def drop_tensor(tensors, facts):
    del tensors["state/0.weight/exp_avg"]


def add_tensor(tensors, facts):
    tensors["state/9.weight/exp_avg"] = torch.zeros(1)


def drop_parameter(tensors, facts):
    facts["groups"][0]["parameters"].remove("2.bias")


def add_parameter(tensors, facts):
    facts["groups"][0]["parameters"].append("9.weight")


def add_state(tensors, facts):
    facts["state"]["9.weight"] = {"values": {}, "tensors": []}


def add_group(tensors, facts):
    facts["groups"].append({"parameters": [], "values": {}, "tensors": []})


def smuggle_parameters(tensors, facts):
    facts["groups"][0]["values"]["params"] = []


def drop_groups(tensors, facts):
    del facts["groups"]


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (drop_tensor, r"missing \['state/0.weight/exp_avg'\]"),
        (add_tensor, r"unknown \['state/9.weight/exp_avg'\]"),
        (drop_parameter, r"group 0 .* missing \['2.bias'\]"),
        (add_parameter, r"group 0 .* unknown \['9.weight'\]"),
        (add_state, r"unknown \['9.weight'\]"),
        (add_group, "2 groups of parameters, the optimizer 1"),
        (smuggle_parameters, "'params' option"),
        (drop_groups, "'groups'"),
    ],
)
def test_a_mismatch_is_named_and_changes_nothing(harm, complaint):
    model, tensors, facts = trained_adam()
    harm(tensors, facts)
    new = Adam(model.parameters(), lr=0.25)
    with pytest.raises(CheckpointError, match=complaint):
        restore_optimizer_(new, named(model), tensors, facts)
    assert len(new.state) == 0
    assert new.param_groups[0]["lr"] == 0.25


def test_a_parameter_without_a_name_is_refused():
    model = small_model()
    optimizer = SGD([*model.parameters(), nn.Parameter(torch.zeros(7))], lr=0.1)
    with pytest.raises(CheckpointError, match=r"shape \[7\] that has no name"):
        flatten_optimizer(optimizer, named(model))


def test_state_of_a_non_parameter_is_refused():
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state["global"] = {"count": 1}
    with pytest.raises(CheckpointError, match="1 things that are in none of its groups"):
        flatten_optimizer(optimizer, named(model))


def test_state_that_is_neither_tensor_nor_json_is_refused_by_name():
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].bias] = {"history": [torch.zeros(1)]}
    with pytest.raises(CheckpointError, match=r"state/0.bias/history of the optimizer\[0\] is"):
        flatten_optimizer(optimizer, named(model))


def test_tied_parameters_are_saved_once_under_their_first_name():
    model = small_model()
    tied = {**named(model), "again": model[0].weight}
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 1)
    tensors, _ = flatten_optimizer(optimizer, tied)
    assert "state/0.weight/momentum_buffer" in tensors
    assert not any("again" in name for name in tensors)
