"""Gradients that are mixed before the update: in runs, in loops of one's own, in steps left out."""

import copy

import pytest
import torch
from torch import nn

import stretto
from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.errors import ConfigError
from stretto.run import RunConfig, assemble, prepare
from stretto.strategies import CrossoverConfig, build_strategy
from stretto.strategies.gossip.config import GossipConfig
from tests.unit.train.test_finite_check import SIZE, Run

GRADIENTS = ["strategy.kind=crossover", "strategy.mix=gradients"]
SHARED = CrossoverConfig(topology="complete", mix="gradients")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["strategy.kind=crossover", "strategy.delay=1"], "none can be late: set delay = 0"),
        (["strategy.kind=dpsgd"], r'there is no gradient yet; kind = "crossover" can'),
        (["strategy.kind=sgp"], r'gradients have none; kind = "crossover" can'),
        (["strategy.kind=crossover", "strategy.mix=gradient"], "strategy.mix"),
        (
            ["strategy.kind=crossover", "strategy.wire=fp8"],
            "no such reference: take own, fp32, bf16, fp16",
        ),
    ],
)
def test_where_gradients_cannot_be_mixed_it_is_said_why(settings, said):
    with pytest.raises(ConfigError, match=said):
        load(RunConfig, None, ["strategy.mix=gradients", *settings])


@pytest.mark.parametrize(
    ("settings", "drift"),
    [
        ({}, True),
        ({"topology": "complete"}, False),
        ({"topology": "complete", "every": 2}, True),
        ({"mix": "parameters"}, False),
        ({"groups": 2}, True),
        ({"groups": 1}, False),
        ({"exact_every": 100}, False),
        ({"consensus_every": 10}, True),
        ({"consensus_every": 10, "consensus_limit": 0.1}, False),
    ],
)
def test_that_models_drift_apart_is_said_where_they_do(settings, drift):
    warnings = GossipConfig(**{"mix": "gradients", **settings}).warnings()
    assert ["drift apart" in line for line in warnings] == [True] * drift


def test_it_is_said_when_the_run_begins(tmp_path):
    def on_rank(transport):
        loaded = load(RunConfig, None, [*GRADIENTS, "data.samples=64", f"run.folder={tmp_path}"])
        world = World(transport.rank, Mesh((1,)))
        parts = assemble(loaded, prepare(loaded.config), world, transport, lambda event: None)
        parts.strategy.close()
        return parts.notes

    ((note,),) = run_threads(1, on_rank)
    assert "drift apart" in note


generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(24, 6, dtype=torch.float64, generator=generator)
TARGETS = torch.randint(0, 3, (24,), generator=generator)
INITIAL = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def steps(model, optimizer, parts, *, to_none=True, clip=None):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        for x, y in parts:
            (nn.functional.cross_entropy(model(x), y) / len(parts)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_loop_of_ones_own_steps_by_the_gradient_of_all(to_none, clip):
    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)

    def work(transport):
        model, optimizer = stretto.distribute(
            copy.deepcopy(INITIAL), make, SHARED, accumulation=2, transport=transport
        )
        mine = (t[transport.rank :: 3].tensor_split(2) for t in (INPUTS, TARGETS))
        return steps(model, optimizer, list(zip(*mine, strict=True)), to_none=to_none, clip=clip)

    reference = copy.deepcopy(INITIAL)
    expected = steps(reference, make(reference.parameters()), [(INPUTS, TARGETS)], clip=clip)
    for found in run_threads(3, work):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("groups", [1, SIZE])
@pytest.mark.parametrize("spoil", ["forward", "backward"])
def test_a_step_may_be_left_out_by_all(spoil, groups, tmp_path):
    settings = ['train.not_finite="skip"', f"strategy.groups={groups}"]
    run = Run(tmp_path, *GRADIENTS, *settings, bad_steps=[5], spoil=spoil)
    assert run.said == [""] * SIZE
    assert [step for step, _ in run.skipped_steps] == [6]
    assert all(bool(torch.isfinite(run.weights(rank)).all()) for rank in range(SIZE))


def test_rolled_back_it_leaves_the_step_out_on_its_second_way(tmp_path):
    skipped = Run(tmp_path / "skip", *GRADIENTS, 'train.not_finite="skip"', bad_steps=[5])
    rolled = Run(tmp_path / "back", *GRADIENTS, 'train.not_finite="rollback"', bad_steps=[5])
    assert rolled.said == [""] * SIZE
    for rank in range(SIZE):
        assert torch.equal(rolled.weights(rank), skipped.weights(rank))


def test_by_default_the_run_ends_with_what_was_before(tmp_path):
    run = Run(tmp_path / "bad", *GRADIENTS, bad_steps=[5])
    assert len(set(run.said)) == 1
    assert "step 6 is not finite: rank 1: layer blocks.1.0 (Conv2d)" in run.said[0]
    good = Run(tmp_path / "good", *GRADIENTS, "train.steps=5")
    assert torch.equal(run.weights(), good.weights())


def test_an_overflow_of_fp16_on_one_rank_leaves_the_step_out_on_all(tmp_path):
    run = Run(tmp_path, *GRADIENTS, 'train.precision="fp16"', bad_steps=[5], spoil="backward")
    assert run.said == [""] * SIZE
    assert run.skipped_steps == [(6, "overflow at a loss scale of 65536, now 32768")]


@pytest.mark.parametrize("reads", [False, True])
def test_gradients_leave_in_backward_and_in_one_round(reads):
    def on_rank(transport):
        strategy = build_strategy(SHARED, transport, calls=["0", "2"])
        strategy.reads_gradients = reads
        model, optimizer = strategy.attach(
            copy.deepcopy(INITIAL), lambda p: torch.optim.SGD(p, lr=0.1)
        )
        strategy.begin(0, 0, True, 0.1)
        model(INPUTS).sum().backward()
        rounds_in_flight = [[mixer.rounds_in_flight for mixer in strategy._mixers]]
        for moment in (strategy.after_backward, optimizer.step, strategy.after_update):
            moment()
            rounds_in_flight.append([mixer.rounds_in_flight for mixer in strategy._mixers])
        strategy.close()
        return rounds_in_flight

    for rounds_in_flight in run_threads(2, on_rank):
        assert rounds_in_flight == [[1, 1], [0, 0], [0, 0], [0, 0]]
