"""Settings of gossip that cannot be are refused with what could."""

import pytest
import torch
from torch import nn

from stretto.comm.local import run_local
from stretto.config import load
from stretto.errors import ConfigError
from stretto.run import RunConfig
from stretto.strategy import STRATEGIES, CrossoverConfig, build_strategy


@pytest.mark.parametrize("kind", ["crossover", "dpsgd", "sgp"])
def test_one_word_is_enough(kind):
    config = load(RunConfig, None, [f"strategy.kind={kind}"]).config
    assert config.strategy == STRATEGIES[kind]()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["strategy.topology=rings"], "did you mean ring"),
        (["strategy.segments=blocks"], "whole, coarse, fine, or balanced 8"),
        (["strategy.wire=topk 1%"], "own, fp32, bf16, fp16"),
        (["strategy.peers=3"], "derangement has no k"),
        (["strategy.delay=-1"], "strategy.delay"),
        (["strategy.kind=sgp", "strategy.wire=bf16"], "strategy.wire"),
        (["strategy.kind=dpsgd", "strategy.delay=0"], "strategy.delay"),
    ],
)
def test_what_cannot_be_is_refused_in_words(settings, said):
    with pytest.raises(ConfigError, match=said):
        load(RunConfig, None, ["strategy.kind=crossover", *settings])


def test_a_size_that_a_topology_cannot_have_is_told_those_that_it_can():
    def on_rank(channel):
        strategy = build_strategy(CrossoverConfig(topology="hypercube"), channel)
        try:
            strategy.attach(nn.Linear(2, 2), lambda p: torch.optim.SGD(p, lr=0.1))
        finally:
            strategy.close()

    with pytest.raises(ConfigError, match=r"power of two.*(2|4)"):
        run_local(3, on_rank)
