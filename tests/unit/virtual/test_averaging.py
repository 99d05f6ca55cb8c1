"""The averaging of virtual workers is chosen by the class of the strategy config."""

import pytest
import torch
from torch import nn

from stretto.config import Config
from stretto.strategies import (
    ADPSGDConfig,
    AllReduceConfig,
    CrossoverConfig,
    DiLoCoConfig,
    SGPConfig,
    ShardedConfig,
)
from stretto.virtual.averaging import (
    FragmentAveraging,
    NoAveraging,
    build_averaging,
    count_replicas,
)
from stretto.virtual.stacked_gossip import StackedMixing, StackedPushSum
from stretto.virtual.stacked_models import StackedModels

WORKERS = 4


class UnknownConfig(Config):
    """A strategy config that virtual workers have no averaging for."""

    kind: str = "unknown"


def averaging_of(config):
    model = nn.Linear(3, 2)
    stack = StackedModels(model, WORKERS, WORKERS)
    return build_averaging(config, model, stack, torch.optim.SGD(stack.values.values(), lr=0.1))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AllReduceConfig(), NoAveraging),
        (ShardedConfig(), NoAveraging),
        (CrossoverConfig(), StackedMixing),
        (SGPConfig(), StackedPushSum),
        (DiLoCoConfig(), FragmentAveraging),
    ],
)
def test_every_kind_of_strategy_has_its_averaging(config, expected):
    assert type(averaging_of(config)) is expected


@pytest.mark.parametrize("config", [UnknownConfig(), ADPSGDConfig()])
def test_a_config_without_an_averaging_is_refused_by_its_class(config):
    with pytest.raises(TypeError, match=type(config).__name__):
        averaging_of(config)


@pytest.mark.parametrize(
    ("config", "replicas"),
    [
        (AllReduceConfig(), 1),
        (ShardedConfig(), 1),
        (CrossoverConfig(), WORKERS),
        (ADPSGDConfig(), WORKERS),
        (DiLoCoConfig(), WORKERS),
    ],
)
def test_replicas_are_counted_by_strategy(config, replicas):
    assert count_replicas(config, WORKERS) == replicas


def test_replicas_of_an_unknown_config_are_not_counted():
    with pytest.raises(TypeError, match="UnknownConfig"):
        count_replicas(UnknownConfig(), WORKERS)
