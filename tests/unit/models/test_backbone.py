"""The head of models of other libraries, and the backbone without it."""

import pytest
import torch
from torch import nn

from stretto.models import backbone_state, head_layer_names


class Asked(nn.Module):
    """A model with its library's method that returns the head."""

    def __init__(self, answer):
        super().__init__()
        self.head, self.also = nn.Linear(2, 3), nn.Linear(2, 3)
        self.body = nn.Linear(2, 2)  # the last linear layer, and not the head
        self.nothing = nn.Identity()
        self.answer = answer

    def get_classifier(self):
        return self.answer(self)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda m: m.head, ("head",)),
        (lambda m: (m.head, m.also), ("head", "also")),
        (lambda m: m.nothing, ("body",)),
        (lambda m: None, ("body",)),
    ],
)
def test_a_model_with_a_method_for_its_head_is_asked(answer, expected):
    assert head_layer_names(Asked(answer)) == expected


def test_otherwise_the_head_is_the_last_linear_layer():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 5)), nn.Softmax())
    assert head_layer_names(model) == ("1.1",)
    assert list(backbone_state(model)) == ["0.weight", "0.bias"]


def test_a_name_that_only_begins_like_the_head_is_in_the_backbone():
    model = nn.ModuleDict({"head_norm": nn.LayerNorm(2), "head": nn.Linear(2, 2)})
    assert list(backbone_state(model)) == ["head_norm.weight", "head_norm.bias"]


def test_buffers_belong_to_the_backbone():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    assert "0.running_mean" in backbone_state(model)


def test_a_model_without_linear_layers_has_no_head():
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    assert head_layer_names(model) == ()
    assert torch.equal(backbone_state(model)["0.weight"], model[0].weight)
