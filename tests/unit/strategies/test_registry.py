"""Registries refuse what they do not know: no config silently becomes all-reduce."""

import pytest
from torch import nn

from stretto.comm.in_process_transports import thread_transports
from stretto.strategies import STRATEGIES, AllReduceConfig, build_strategy, check_strategy


class ForeignConfig:
    """A config of no strategy; like all configs it has a kind."""

    kind = "allreduce"


def test_an_unknown_config_is_refused_when_a_strategy_is_built():
    (transport,) = thread_transports(1)
    with pytest.raises(TypeError, match="ForeignConfig is not the config of a strategy"):
        build_strategy(ForeignConfig(), transport)


def test_an_unknown_config_is_refused_when_it_is_checked():
    with pytest.raises(TypeError, match="expected one of AllReduceConfig"):
        check_strategy(ForeignConfig(), nn.Linear(2, 2), [])


@pytest.mark.parametrize("kind", STRATEGIES)
def test_every_known_config_builds_a_strategy(kind):
    (transport,) = thread_transports(1)
    strategy = build_strategy(STRATEGIES[kind](), transport)
    assert type(strategy).__name__ != "AllReduce" or STRATEGIES[kind] is AllReduceConfig
