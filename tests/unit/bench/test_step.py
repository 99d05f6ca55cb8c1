"""Step benchmarks: the peers, the groups of FSDP2, and the lower bound."""

from types import SimpleNamespace

import pytest

from stretto.bench.peers import fsdp2_groups, missing_peer_notices, parse_peers
from stretto.bench.step import required_link_bytes, step_bound_s
from stretto.cluster.world import Mesh
from stretto.errors import ConfigError
from stretto.models import GPTConfig, build_model
from stretto.run import RunConfig
from stretto.strategies import AllReduceConfig, CrossoverConfig
from stretto.strategies.sharded.config import ShardedConfig

SHARDED = RunConfig(strategy=ShardedConfig())
GPT = GPTConfig(blocks=3, width=32, context=8)


@pytest.mark.parametrize(
    ("names", "config", "peers"),
    [
        ("", RunConfig(), ("ddp",)),
        ("", SHARDED, ("ddp", "fsdp2")),
        ("fsdp2", RunConfig(), ("fsdp2",)),
        (" ddp , fsdp2,", RunConfig(), ("ddp", "fsdp2")),
        ("none", SHARDED, ()),
    ],
)
def test_peers_are_those_named_or_those_like_the_strategy(names, config, peers):
    assert parse_peers(names, config) == peers


@pytest.mark.parametrize(
    ("names", "message"), [("fsdp", "no peer 'fsdp'"), ("deepspeed", "DeepSpeed is not installed")]
)
def test_a_missing_peer_is_named(names, message):
    with pytest.raises(ConfigError, match=message):
        parse_peers(names, SHARDED)


def test_missing_peers_of_a_sharded_strategy_are_reported():
    assert missing_peer_notices(SHARDED) == [
        "DeepSpeed is not installed: it is not among the peers"
    ]
    assert missing_peer_notices(RunConfig()) == []


@pytest.mark.parametrize(
    ("tied", "least", "sizes"),
    [
        (False, 0, [1, 1, 1, 1, 1]),  # blocks, norm, head
        (False, 40_000, [1, 1, 3]),
        (True, 40_000, [1, 1, 2]),  # the head shares the embedding's weights, which the root has
    ],
)
def test_each_block_is_a_group_and_embeddings_belong_to_the_root(tied, least, sizes):
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
def test_link_bytes_depend_on_the_strategy_and_the_wire_format(strategy, times):
    model = build_model(GPT, 0)
    whole = sum(p.nbytes for p in model.parameters())
    carried = required_link_bytes(RunConfig(model=GPT, strategy=strategy), model, hosts=4)
    assert carried == (None if times is None else pytest.approx(0.75 * times * whole))


@pytest.mark.parametrize(
    ("groups", "per_host", "times"),
    [(None, 1, 1), (None, 2, None), ("hosts", 2, 1), (4, 2, 1), (8, 2, None), (2, 1, None)],
)
def test_a_host_that_is_one_group_sends_its_model_once_to_each_peer(groups, per_host, times):
    model, strategy = build_model(GPT, 0), CrossoverConfig(groups=groups)
    config = RunConfig(model=GPT, strategy=strategy)
    carried = required_link_bytes(config, model, hosts=4, per_host=per_host)
    whole = sum(p.nbytes for p in model.parameters())
    assert carried == (None if times is None else times * whole)


@pytest.mark.parametrize(
    ("rate", "num_bytes", "bound"),
    [(8_000, 2_000, 2.0), (8_000, 500, 1.0), (None, 2_000, None), (8_000, None, None)],
)
def test_the_bound_is_the_longer_of_computation_and_link_time(rate, num_bytes, bound):
    world = SimpleNamespace(link_bits_per_s=rate, mesh=Mesh((1, 1)))
    assert step_bound_s(num_bytes, 1.0, world) == bound
