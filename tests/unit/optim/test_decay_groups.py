"""Which parameters have no weight decay and no ratio: by type and dimensions, not by name."""

import pytest
import torch
from torch import nn

from stretto.optim import no_decay_parameter_names, split_by_decay


class Tricky(nn.Module):
    """Misleading names: a matrix called bias, and a norm whose weight has two dimensions."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(2, 3))
        self.norm = nn.Linear(3, 2)
        self.weight = nn.LayerNorm((2, 3))
        self.scale = nn.Parameter(torch.ones(()))


NORMS = [
    nn.BatchNorm1d(3),
    nn.BatchNorm2d(3),
    nn.BatchNorm3d(3),
    nn.SyncBatchNorm(3),
    nn.LayerNorm((3, 2)),
    nn.GroupNorm(1, 3),
    nn.InstanceNorm1d(3, affine=True),
    nn.InstanceNorm2d(3, affine=True),
    nn.InstanceNorm3d(3, affine=True),
    nn.RMSNorm((3, 2)),
]


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
def test_no_parameter_of_a_norm_decays(norm):
    model = nn.Sequential(nn.Conv2d(1, 3, 1), norm)
    own = {f"1.{name}" for name, _ in norm.named_parameters()}
    assert own
    assert no_decay_parameter_names(model) == own | {"0.bias"}


def test_names_do_not_matter():
    undecayed = {"norm.bias", "weight.weight", "weight.bias", "scale"}
    assert no_decay_parameter_names(Tricky()) == undecayed


def test_a_tied_parameter_of_a_norm_does_not_decay_under_any_of_its_names():
    norm, other = nn.LayerNorm((2, 3)), nn.Linear(3, 2)
    other.weight = norm.weight
    model = nn.ModuleDict({"linear": other, "norm": norm})
    assert no_decay_parameter_names(model) == {
        "linear.weight",
        "linear.bias",
        "norm.weight",
        "norm.bias",
    }
    (group,) = split_by_decay(model.parameters(), model)
    assert group["weight_decay"] == 0


def test_tied_weights_that_decay_are_in_one_group_once():
    model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    model[1].weight = model[0].weight
    (group,) = split_by_decay(model.parameters(), model)
    assert group == {"params": [model[0].weight]}


def test_groups_keep_the_order_and_empty_ones_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    decayed, undecayed = split_by_decay(model.parameters(), model)
    held = dict(model.named_parameters())
    names = {id(p): name for name, p in held.items()}
    assert [names[id(p)] for p in decayed["params"]] == ["0.weight", "2.weight"]
    assert [names[id(p)] for p in undecayed["params"]] == ["0.bias", "1.weight", "1.bias", "2.bias"]
    assert (undecayed["weight_decay"], undecayed["adapt"]) == (0.0, False)
    assert split_by_decay([held["0.weight"]], model) == [{"params": [held["0.weight"]]}]
    assert split_by_decay([], model) == []


def test_parameters_of_no_model_are_split_by_their_dimensions():
    stranger, offset = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    decayed, undecayed = split_by_decay([stranger, offset])
    assert (decayed["params"], undecayed["params"]) == ([stranger], [offset])


def test_optimizers_of_torch_take_the_groups():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(split_by_decay(model.parameters(), model), lr=0.1, weight_decay=0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
