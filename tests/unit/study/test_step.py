"""What is timed as a training step: who takes part, how FSDP2 is grouped, and the bound."""

from types import SimpleNamespace

import pytest

from stretto.cluster.world import Mesh
from stretto.errors import ConfigError
from stretto.model import GPTConfig, build_model
from stretto.run import RunConfig
from stretto.strategy import AllReduceConfig, CrossoverConfig
from stretto.strategy.sharded.config import ShardedConfig
from stretto.study.contenders import absent_peers, chosen_peers, fsdp2_groups
from stretto.study.step import bound_s, must_carry

SHARDED = RunConfig(strategy=ShardedConfig())
GPT = GPTConfig(blocks=3, width=32, context=8)


@pytest.mark.parametrize(
    ("words", "config", "peers"),
    [
        ("", RunConfig(), ("ddp",)),
        ("", SHARDED, ("ddp", "fsdp2")),
        ("fsdp2", RunConfig(), ("fsdp2",)),
        (" ddp , fsdp2,", RunConfig(), ("ddp", "fsdp2")),
        ("none", SHARDED, ()),
    ],
)
def test_peers_are_those_named_or_those_like_ours(words, config, peers):
    assert chosen_peers(words, config) == peers


@pytest.mark.parametrize(
    ("words", "said"), [("fsdp", "no peer 'fsdp'"), ("deepspeed", "DeepSpeed is not installed")]
)
def test_a_peer_that_is_not_there_is_named(words, said):
    with pytest.raises(ConfigError, match=said):
        chosen_peers(words, SHARDED)


def test_who_is_missing_is_told_beside_a_sharded_strategy():
    assert absent_peers(SHARDED) == ["DeepSpeed is not installed: it is not among the peers"]
    assert absent_peers(RunConfig()) == []


@pytest.mark.parametrize(
    ("tied", "least", "sizes"),
    [
        (False, 0, [1, 1, 1, 1, 1]),  # blocks, norm, head
        (False, 40_000, [1, 1, 3]),
        (True, 40_000, [1, 1, 2]),  # the head's weights are the embedding's: the root has them
    ],
)
def test_a_block_is_a_group_and_embeddings_are_the_roots(tied, least, sizes):
    model = build_model(GPT.model_copy(update={"tied": tied}), 0)
    groups = fsdp2_groups(model, least)
    assert [len(group) for group in groups] == sizes
    assert [group[0] for group in groups[:3]] == list(model.blocks)
    assert model.tokens not in [module for group in groups for module in group]


@pytest.mark.parametrize(
    ("strategy", "times"),
    [
        (AllReduceConfig(), 2),
        (AllReduceConfig(wire="bf16"), 1),
        (AllReduceConfig(wire="topk 1%"), None),
        (ShardedConfig(plan="ddp"), 2),
        (ShardedConfig(plan="zero2"), 2),
        (ShardedConfig(plan="zero2", wire="bf16"), 1.5),
        (ShardedConfig(plan="dear", parameters="bf16"), 1),
        (ShardedConfig(plan="dear", parameters="bf16", wire="fp32"), 1.5),
    ],
)
def test_links_carry_what_travels_in_the_type_in_which_it_travels(strategy, times):
    model = build_model(GPT, 0)
    whole = sum(p.nbytes for p in model.parameters())
    carried = must_carry(RunConfig(model=GPT, strategy=strategy), model, hosts=4)
    assert carried == (None if times is None else pytest.approx(0.75 * times * whole))


@pytest.mark.parametrize(
    ("groups", "per_host", "times"),
    [(None, 1, 1), (None, 2, None), ("hosts", 2, 1), (4, 2, 1), (8, 2, None), (2, 1, None)],
)
def test_a_host_that_is_a_group_tells_its_model_once_to_each_peer(groups, per_host, times):
    model, strategy = build_model(GPT, 0), CrossoverConfig(groups=groups)
    config = RunConfig(model=GPT, strategy=strategy)
    carried = must_carry(config, model, hosts=4, per_host=per_host)
    whole = sum(p.nbytes for p in model.parameters())
    assert carried == (None if times is None else times * whole)


@pytest.mark.parametrize(
    ("rate", "num_bytes", "bound"),
    [(8_000, 2_000, 2.0), (8_000, 500, 1.0), (None, 2_000, None), (8_000, None, None)],
)
def test_the_bound_is_compute_or_the_link(rate, num_bytes, bound):
    world = SimpleNamespace(link_bits_per_s=rate, mesh=Mesh((1, 1)))
    assert bound_s(num_bytes, 1.0, world) == bound
