"""Gossip with lost messages: push-sum conserves mass, and workers still reach consensus."""

from collections import defaultdict

import pytest
import torch
from torch import nn

from stretto.errors import ConfigError
from stretto.strategies import AllReduceConfig, CrossoverConfig, DiLoCoConfig, SGPConfig
from stretto.virtual.averaging import check_lost_share
from stretto.virtual.stacked_gossip import StackedMixing, StackedPushSum
from stretto.virtual.stacked_models import StackedModels
from tests.laws.test_gossip import Irregular

WORKERS, STEPS = 4, 60


def differing_workers(kind, config, lost):
    """Return gossip of workers whose models differ at the start, and their stacked models."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    stack = StackedModels(model, WORKERS, WORKERS)
    for value in stack.values.values():
        value.data += torch.arange(WORKERS).reshape(-1, *[1] * (value.dim() - 1))
    return kind(config, model, stack, lost), stack


def mass_of(gossip, index):
    """Return the mass of a segment: held by workers, in flight, lost."""
    return (
        float(gossip.masses[index].sum()),
        gossip.in_flight_mass(index),
        gossip.lost_masses[index],
    )


@pytest.mark.parametrize("lost", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("kind", [SGPConfig, Irregular])
def test_mass_held_in_flight_and_lost_adds_up_to_the_number_of_workers(kind, delay, lost):
    gossip, _ = differing_workers(StackedPushSum, kind(delay=delay, segments="fine"), lost)
    for step in range(STEPS):
        gossip.before_update()
        gossip.after_update(step, 0.1)
        for index in range(2):
            assert sum(mass_of(gossip, index)) == pytest.approx(WORKERS, abs=1e-12)
    held_mass, in_flight_mass, lost_mass = mass_of(gossip, 0)
    assert (in_flight_mass > 0) == (delay > 0)
    assert (lost_mass > 0) == (lost > 0)
    assert held_mass > 0


@pytest.mark.parametrize("delay", [0, 1])
def test_workers_reach_consensus_despite_lost_messages(delay):
    """A lost message takes parameters and mass alike, so the rest is still a weighted mean."""
    gossip, stack = differing_workers(StackedPushSum, SGPConfig(delay=delay), 0.2)
    for step in range(STEPS):
        gossip.before_update()
        gossip.after_update(step, 0.1)
    means = gossip.means()
    assert stack.consensus_distance(means) < 1e-6
    for name, value in stack.values.items():
        torch.testing.assert_close(value[0].detach(), means[name], rtol=0, atol=1e-4)


def test_a_worker_keeps_its_parameters_when_the_message_to_it_is_lost():
    lost, kept = (differing_workers(StackedMixing, CrossoverConfig(), share) for share in (0.3, 0))
    found = {name: value.detach() for name, value in lost[1].values.items()}
    before = {name: value.clone() for name, value in found.items()}
    for gossip, _ in (lost, kept):
        gossip.after_update(0, 0.1)
    for layer in ("0", "1"):  # a segment each, whose values share a message
        is_lost = (found[f"{layer}.bias"] == before[f"{layer}.bias"]).all(dim=1)
        assert 0 < is_lost.sum() < WORKERS, "some messages are lost, not all: choose another share"
        for name in (f"{layer}.weight", f"{layer}.bias"):
            unharmed = kept[1].values[name].detach()
            assert torch.equal(found[name][is_lost], before[name][is_lost])
            assert torch.equal(found[name][~is_lost], unharmed[~is_lost])
            assert (unharmed != before[name]).flatten(1).all(dim=1).all()


def test_the_share_of_lost_messages_is_the_same_for_every_pair():
    config = SGPConfig(topology="derangement", segments="whole")
    gossip, _ = differing_workers(StackedPushSum, config, 0.25)
    topology, is_lost = config.build_topology(), defaultdict(list)
    for step in range(3000):
        gossip.masses[0].fill_(1.0)
        gossip.before_update()
        gossip.after_update(step, 0.1)
        for receiver, mass in enumerate(gossip.masses[0].tolist()):
            ((sender, _),) = topology(receiver, WORKERS, step, 0).receives
            assert mass in (0.5, 1.0)  # a worker keeps a half, and the other half arrives or not
            is_lost[sender, receiver].append(mass == 0.5)
    assert len(is_lost) == WORKERS * (WORKERS - 1)
    for losses in is_lost.values():
        assert sum(losses) / len(losses) == pytest.approx(0.25, abs=0.06)


def test_an_exact_average_keeps_the_mean_and_resets_the_masses():
    gossip, stack = differing_workers(StackedPushSum, SGPConfig(exact_every=5, delay=1), 0.3)
    for step in range(4):
        gossip.before_update()
        gossip.after_update(step, 0.1)
    left = gossip.means()
    gossip.before_update()
    gossip.after_update(4, 0.1)
    assert mass_of(gossip, 0) == (WORKERS, 0, 0)
    for name, value in stack.values.items():
        torch.testing.assert_close(value[0].detach(), left[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", [AllReduceConfig(), DiLoCoConfig()])
def test_strategies_that_wait_for_every_message_refuse_lost_ones(config):
    check_lost_share(config, 0.0)
    with pytest.raises(ConfigError, match="only gossip tolerates loss: crossover, dpsgd, sgp"):
        check_lost_share(config, 0.01)


def test_the_share_of_lost_messages_is_below_one():
    with pytest.raises(ConfigError, match="expected 0 or more, and below 1"):
        check_lost_share(SGPConfig(), 1.0)
