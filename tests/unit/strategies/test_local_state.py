"""Optimizer state of a rank is restored to the device where it is used."""

import pytest
import torch
from torch import nn

from stretto.strategies.local_state import load_optimizer_tensors_


@pytest.mark.parametrize(("options", "counted_on"), [({}, "cpu"), ({"capturable": True}, "meta")])
def test_what_an_optimizer_remembers_lies_where_its_parameter_does(options, counted_on):
    parameter = nn.Parameter(torch.empty(3, device="meta"))  # plays a GPU
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.param_groups[0].update(options)
    kept = {"weight/momentum_buffer": torch.ones(3), "weight/step": torch.tensor(4.0)}
    load_optimizer_tensors_(optimizer, {id(parameter): "weight"}, kept)
    remembered = optimizer.state[parameter]
    assert remembered["momentum_buffer"].device.type == "meta"
    assert remembered["step"].device.type == counted_on
    assert remembered["step"] is not kept["weight/step"]
