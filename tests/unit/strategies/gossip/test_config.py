"""Settings of gossip that cannot be are refused with what could."""

import pytest
import torch
from torch import nn

from stretto.cluster.world import Mesh
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.errors import ConfigError
from stretto.run import RunConfig
from stretto.strategies import STRATEGIES, CrossoverConfig, build_strategy, chosen_settings


@pytest.mark.parametrize("kind", ["crossover", "dpsgd", "sgp"])
def test_one_word_is_enough(kind):
    config = load(RunConfig, None, [f"strategy.kind={kind}"]).config
    assert config.strategy == STRATEGIES[kind]()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["strategy.topology=rings"], "did you mean ring"),
        (["strategy.segments=blocks"], "whole, coarse, fine, or balanced 8"),
        (["strategy.wire=topk 1%"], "own, fp32, bf16, fp16, fp8"),
        (["strategy.peers=3"], "derangement leaves no choice of peers"),
        (["strategy.delay=-1"], "strategy.delay"),
        (["strategy.kind=sgp", "strategy.wire=bf16"], "strategy.wire"),
        (["strategy.kind=sgp", "strategy.wire=fp8"], "strategy.wire"),
        (["strategy.exact_every=0"], "strategy.exact_every"),
        (["strategy.consensus_limit=0.02"], "nobody measures.*strategy.consensus_every, 10"),
        (["strategy.consensus_every=2", "strategy.consensus_limit=0"], "consensus_limit"),
        (["strategy.consensus_every=2", "strategy.consensus_sample=1.5"], "consensus_sample"),
        (["strategy.kind=dpsgd", "strategy.delay=0"], "strategy.delay"),
        (["strategy.groups=0"], "strategy.groups"),
        (["strategy.groups=host"], "strategy.groups.*hosts"),
    ],
)
def test_what_cannot_be_is_refused_in_words(settings, said):
    with pytest.raises(ConfigError, match=said):
        load(RunConfig, None, ["strategy.kind=crossover", *settings])


def test_a_size_that_a_topology_cannot_have_is_told_those_that_it_can():
    def on_rank(transport):
        strategy = build_strategy(CrossoverConfig(topology="hypercube"), transport)
        try:
            strategy.attach(nn.Linear(2, 2), lambda p: torch.optim.SGD(p, lr=0.1))
        finally:
            strategy.close()

    with pytest.raises(ConfigError, match=r"power of two.*(2|4)"):
        run_threads(3, on_rank)


def attached(mesh, **settings):
    """Attach on every rank of ``mesh``; return the groups they are in."""

    def on_rank(transport):
        strategy = build_strategy(CrossoverConfig(**settings), transport)
        try:
            strategy.attach(nn.Linear(2, 2), lambda p: torch.optim.SGD(p, lr=0.1))
        finally:
            strategy.close()
        return strategy.inspect().group.index

    return run_threads(mesh, on_rank)


@pytest.mark.parametrize(
    ("mesh", "groups", "of_ranks"),
    [
        (Mesh((2, 2)), "hosts", [0, 0, 1, 1]),
        (Mesh((4,)), "hosts", [0, 0, 0, 0]),
        (Mesh((4,)), 2, [0, 0, 1, 1]),
        (Mesh((2, 2)), None, [0, 1, 2, 3]),
        (Mesh((1,)), 1, [0]),
    ],
)
def test_groups_are_ranks_in_a_row_or_the_ranks_of_a_host(mesh, groups, of_ranks):
    assert attached(mesh, groups=groups) == of_ranks


@pytest.mark.parametrize(
    ("mesh", "settings", "said"),
    [
        (Mesh((4,)), {"groups": 3}, r"strategy\.groups = 3.*4 ranks can be 1, 2 or 4 groups"),
        (Mesh((2,)), {"groups": 4}, r"2 ranks can be 1 or 2 groups of equal size, not 4"),
        (
            Mesh((3, 1)),
            {"groups": "hosts"},
            r"'hosts': hosts have 3, 1 ranks, .*4 ranks can be 1, 2 or 4 groups",
        ),
        (
            Mesh((6,)),
            {"groups": 3, "topology": "hypercube"},
            r"groups = 3, strategy\.topology = 'hypercube': needs a power of two: 2 or 4, not 3",
        ),
    ],
)
def test_groups_that_cannot_be_are_told_those_that_can(mesh, settings, said):
    with pytest.raises(ConfigError, match=said):
        attached(mesh, **settings)


def test_hosts_are_written_down_as_the_number_that_they_are():
    config = CrossoverConfig(groups="hosts")
    assert chosen_settings(config, Mesh((2, 2, 2)), nn.Linear(2, 2)) == {"groups": 3}
    assert chosen_settings(CrossoverConfig(), Mesh((2, 2)), nn.Linear(2, 2)) == {}
    with pytest.raises(ConfigError, match="hosts have 2, 1 ranks"):
        chosen_settings(config, Mesh((2, 1)), nn.Linear(2, 2))
