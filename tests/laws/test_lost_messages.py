"""What becomes of gossip when messages do not arrive: push-sum keeps account of all mass."""

import pytest
import torch
from torch import nn

from stretto.errors import ConfigError
from stretto.strategy import AllReduceConfig, CrossoverConfig, DiLoCoConfig, SGPConfig
from stretto.virtual.gossip import Mixed, Pushed
from stretto.virtual.meetings import check_lost
from stretto.virtual.stack import Stack
from tests.laws.test_gossip import Irregular

WORKERS, STEPS = 4, 60


def begun_apart(kind, config, lost):
    """Return gossip of workers that begin apart, and the stack of their values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    stack = Stack(model, WORKERS, WORKERS)
    for value in stack.values.values():
        value.data += torch.arange(WORKERS).reshape(-1, *[1] * (value.dim() - 1))
    return kind(config, model, stack, lost), stack


def account(gossip, index):
    """Return the mass of a segment: with workers, under way, lost."""
    return float(gossip.masses[index].sum()), gossip.under_way(index), gossip.lost_masses[index]


@pytest.mark.parametrize("lost", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("kind", [SGPConfig, Irregular])
def test_mass_is_with_workers_under_way_or_lost(kind, delay, lost):
    gossip, _ = begun_apart(Pushed, kind(delay=delay, segments="fine"), lost)
    for step in range(STEPS):
        gossip.before_update()
        gossip.after_update(step, 0.1)
        for index in range(2):
            assert sum(account(gossip, index)) == pytest.approx(WORKERS, abs=1e-12)
    live, under_way, gone = account(gossip, 0)
    assert (under_way > 0) == (delay > 0)
    assert (gone > 0) == (lost > 0)
    assert live > 0


@pytest.mark.parametrize("delay", [0, 1])
def test_workers_come_together_all_the_same(delay):
    """Value and mass are lost together, so that what is left is still a mean, if not of all."""
    gossip, stack = begun_apart(Pushed, SGPConfig(delay=delay), 0.2)
    for step in range(STEPS):
        gossip.before_update()
        gossip.after_update(step, 0.1)
    means = gossip.means()
    assert stack.apart(means) < 1e-6
    for name, value in stack.values.items():
        torch.testing.assert_close(value[0].detach(), means[name], rtol=0, atol=1e-4)


def test_a_lost_difference_leaves_a_worker_where_it_is():
    lost, kept = (begun_apart(Mixed, CrossoverConfig(), share)[0] for share in (0.3, 0.0))
    before = [value.clone() for value in lost._segments[0]]
    who = lost._who(0, 0, before[0])
    gone = (who.lost > 0).any(dim=1).numpy()
    assert 0 < gone.sum() < WORKERS, "some messages are lost, not all: choose another share"
    for gossip in (lost, kept):
        gossip.after_update(0, 0.1)
    for now, at_first, unharmed in zip(lost._segments[0], before, kept._segments[0], strict=True):
        assert torch.equal(now[gone], at_first[gone])
        assert torch.equal(now[~gone], unharmed[~gone])


def test_as_many_are_lost_as_was_said_whoever_is_told():
    gossip, stack = begun_apart(Pushed, SGPConfig(topology="derangement"), 0.25)
    like = next(iter(stack.values.values()))
    rounds = [gossip._who(step, 0, like) for step in range(3000)]
    who, lost = (torch.cat([getattr(one, name) for one in rounds], 1) for name in ("who", "lost"))
    for receiver in range(WORKERS):
        for sender in set(range(WORKERS)) - {receiver}:
            gone = lost[receiver][who[receiver] == sender] > 0
            assert float(gone.double().mean()) == pytest.approx(0.25, abs=0.06)


def test_an_exact_average_is_of_what_is_left_and_masses_are_whole_again():
    gossip, stack = begun_apart(Pushed, SGPConfig(exact_every=5, delay=1), 0.3)
    for step in range(4):
        gossip.before_update()
        gossip.after_update(step, 0.1)
    left = gossip.means()
    gossip.before_update()
    gossip.after_update(4, 0.1)
    assert account(gossip, 0) == (WORKERS, 0, 0)
    for name, value in stack.values.items():
        torch.testing.assert_close(value[0].detach(), left[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", [AllReduceConfig(), DiLoCoConfig()])
def test_whoever_waits_for_every_message_cannot_lose_one(config):
    check_lost(config, 0.0)
    with pytest.raises(ConfigError, match="gossip goes on without: crossover, dpsgd, sgp"):
        check_lost(config, 0.01)


def test_a_share_is_below_one():
    with pytest.raises(ConfigError, match="0 to below 1"):
        check_lost(SGPConfig(), 1.0)
