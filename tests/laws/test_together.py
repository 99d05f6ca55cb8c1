"""Ranks that gossip and now and then meet: histories against plain NumPy, and who asked for it."""

import numpy as np
import pytest
import torch
from torch import nn

import stretto
from stretto.comm.local import run_local
from stretto.comm.recording import RecordingChannel
from stretto.strategy import CrossoverConfig, DPSGDConfig, SGPConfig, build_strategy
from stretto.topology.analysis import matrix
from tests.laws.test_gossip import (
    CUTS,
    LR,
    STEPS,
    WORKERS,
    Chain,
    Irregular,
    Workers,
    assert_same,
    mixed,
    push,
    receive,
    trained,
)

EVERY = 5


def meets(step):
    return (step + 1) % EVERY == 0


def mean_of(x):
    """Return every worker's weights as the mean of all."""
    means = [np.mean([weights[layer] for weights in x], axis=0) for layer in range(2)]
    return [[mean.copy() for mean in means] for _ in x]


def crossover(config, workers):
    """Return the history of workers, or groups, that now and then meet and drop the rest."""
    expected, left = [], []
    for step in range(STEPS):
        workers.adapt(step)
        if meets(step):
            workers.x, left = mean_of(workers.x), []
        elif not config.delay:
            workers.x = mixed(workers.x, config.who(), step)
        else:
            for number, was in left:
                then = mixed(was, config.who(), number)
                for x, old, new in zip(workers.x, was, then, strict=True):
                    for layer in range(2):
                        x[layer] = x[layer] + new[layer] - old[layer]
            left = [(step, workers.copy())]
        expected.append(workers.copy())
    return expected


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_crossover_that_meets_drops_what_is_under_way(delay, reads):
    config = CrossoverConfig(**CUTS, seed=5, delay=delay, exact_every=EVERY)
    history = trained(config, reads=reads)
    assert_same(history, crossover(config, Workers()))
    assert_equal_where_they_met(history)


def assert_equal_where_they_met(history):
    first, *others = history
    for step in range(STEPS):
        same = all(
            np.array_equal(mine, theirs)
            for other in others
            for mine, theirs in zip(first[step], other[step], strict=True)
        )
        assert same == meets(step), step


def pushing(config, workers):
    """Return the history of workers, or groups, whose masses are 1 again where they meet."""
    size, expected = len(workers.x), []
    w, under_way = np.ones(size), []
    z = workers.copy()
    for step in range(STEPS):
        workers.adapt(step, at=z)
        if meets(step):
            for arriving in under_way:
                w = receive(workers.x, w, arriving)
            assert w.sum() == pytest.approx(size)
            workers.x, w, under_way = mean_of(workers.x), np.ones(size), []
        else:
            if config.delay and len(under_way) >= config.delay:
                w = receive(workers.x, w, under_way.pop(0))
            under_way.append(push(workers.x, w, matrix(config.who(), size, step)))
            w = under_way[-1][2]
            if not config.delay:
                w = receive(workers.x, w, under_way.pop(0))
        z = [[value / mass for value in x] for x, mass in zip(workers.x, w, strict=True)]
        expected.append([[value.copy() for value in weights] for weights in z])
    return expected


@pytest.mark.parametrize("kind", [SGPConfig, Irregular])
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_sgp_that_meets_counts_all_that_is_under_way(kind, delay):
    config = kind(delay=delay, exact_every=EVERY)
    masses = []
    history = trained(config, see=lambda s, step: masses.append((step, s._mixers[0].mass)))
    assert_same(history, pushing(config, Workers()))
    assert_equal_where_they_met(history)
    assert all(mass == 1.0 for step, mass in masses if meets(step))


def test_momentum_stays_each_ranks_own():
    def on_rank(channel):
        strategy = build_strategy(DPSGDConfig(exact_every=1), channel)
        model, optimizer = strategy.attach(
            Chain(), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)
        )
        strategy.begin(0, 0, True, LR)
        model(torch.full((1, 5), channel.rank + 1.0, dtype=torch.float64)).sum().backward()
        strategy.after_backward()
        strategy.after_update()
        strategy.close()
        weight = model.first.weight
        return weight.detach().clone(), optimizer.state[weight]["momentum_buffer"].clone()

    (one, mine), (other, theirs) = run_local(2, on_rank)
    assert torch.equal(one, other)
    assert not torch.equal(mine, theirs)


def test_a_loop_of_ones_own_meets_as_well():
    def on_rank(channel):
        config = CrossoverConfig(delay=1, exact_every=2, consensus_every=1)
        model, optimizer = stretto.distribute(
            Chain(), lambda p: torch.optim.SGD(p, lr=LR), config, channel=channel
        )
        found = []
        for _ in range(4):
            model(torch.full((1, 5), channel.rank + 1.0, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(model.first.weight.detach().clone())
        return found

    pairs = zip(*run_local(2, on_rank), strict=True)
    assert [torch.equal(*pair) for pair in pairs] == [False, True, False, True]


def big():
    """Return about 100,000 parameters in segments of very different sizes."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(400, 200), nn.Linear(200, 100), nn.Linear(100, 5, bias=False))


def scattered(config, steps, *, size=4, noise=0.01, see=lambda *_: None, left_out=()):
    """Let ranks that begin apart mix without learning; return what each saw, step by step."""

    def on_rank(channel):
        strategy = build_strategy(config, channel)
        model, _ = strategy.attach(big(), lambda p: torch.optim.SGD(p, lr=0.0))
        draw = torch.Generator().manual_seed(channel.rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn(parameter.shape, generator=draw))
        told = []
        for step in range(steps):
            strategy.settle()
            full = strategy.apart()
            strategy.unsettle()
            strategy.begin(step, 0, True, 0.0)
            due = strategy._together.due
            agreed = strategy.after_backward(update=step not in left_out)
            if step not in left_out:
                strategy.after_update()
            see(strategy)
            weights = torch.cat([p.detach().flatten() for p in model.parameters()])
            told.append((full, agreed.apart, due, weights))
        strategy.close()
        return told

    return run_local(size, on_rank)


@pytest.mark.parametrize(("share", "close"), [(0.001, 0.1), (0.01, 0.03), (1.0, 1e-6)])
@pytest.mark.parametrize("cut", ["whole", "coarse"])
@pytest.mark.parametrize("kind", [CrossoverConfig, SGPConfig])
def test_a_sample_tells_how_far_apart_all_are(kind, cut, share, close):
    config = kind(segments=cut, consensus_every=2, consensus_sample=share)
    told = scattered(config, 5)
    for steps in told:
        assert [step[1] for step in steps] == [step[1] for step in told[0]], "known to all alike"
        apart = [step[1] for step in steps]
        assert apart[0] is apart[1] is apart[3] is None
        # Looked at in steps 1 and 3, as they began; read a step later.
        assert apart[2] == pytest.approx(steps[1][0], rel=close)
        assert apart[4] == pytest.approx(steps[3][0], rel=close, abs=1e-7)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("reads", [False, True])
def test_what_is_measured_is_what_a_step_begins_with(reads, delay):
    found = {}

    def see(strategy, step):
        if not strategy._channel.rank:
            found[step] = float(strategy._together.state()["apart"])

    config = CrossoverConfig(**CUTS, delay=delay, consensus_every=1, consensus_sample=1.0)
    history = trained(config, reads=reads, see=see)
    for step in range(1, STEPS):
        before = [[w.ravel() for w in steps[step - 1]] for steps in history]
        x = np.array([np.concatenate(weights) for weights in before])
        far = ((x - x.mean(0)) ** 2).sum() / WORKERS / (x.mean(0) ** 2).sum()
        assert found[step] == pytest.approx(far**0.5, rel=1e-6)


def test_what_was_heard_is_measured_where_a_rank_had_no_samples():
    def on_rank(channel):
        config = CrossoverConfig(consensus_every=2, consensus_sample=1.0)
        strategy = build_strategy(config, channel, calls=("first", "second"))
        model, _ = strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=LR))
        with torch.no_grad():
            model.first.weight.add_(channel.rank)
        for step in range(2):  # no forward, which would wait
            strategy.begin(step, 0, True, LR)
            strategy.after_backward()
            strategy.after_update()
        strategy.begin(2, 0, True, LR)
        strategy.close()
        return strategy._together.apart

    assert run_local(2, on_rank) == [pytest.approx(0, abs=1e-7)] * 2


def test_a_step_that_all_end_together_has_no_round():
    def on_rank(channel):
        recording = RecordingChannel(channel)
        strategy = build_strategy(CrossoverConfig(delay=1, exact_every=2), recording)
        strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=LR))
        told = []
        for step in range(4):
            recording.sent.clear()
            strategy.begin(step, 0, True, LR)
            strategy.after_backward()
            strategy.after_update()
            for mixer in strategy._mixers:
                mixer.wait()
            told.append(sorted({message.peer < 0 for message in recording.sent}))
        strategy.close()
        return told

    assert run_local(2, on_rank) == [[[False], [True]] * 2] * 2


def all_equal(told, step):
    return all(torch.equal(steps[step][3], told[0][step][3]) for steps in told)


@pytest.mark.parametrize("settings", [{}, {"delay": 1}, {"delay": 1, "wire": "fp8"}], ids=str)
def test_too_far_apart_all_meet_in_the_same_step(settings):
    config = CrossoverConfig(**settings, consensus_every=2, consensus_limit=0.001)
    told = scattered(config, 6)
    dues = [[due for _, _, due, _ in steps] for steps in told]
    # Seen in step 1, known in step 2; later there is nothing to meet for.
    assert dues == [[False, False, True, False, False, False]] * 4
    assert [all_equal(told, step) for step in range(6)] == [False] * 2 + [True] * 4
    mean = torch.stack([steps[1][3] for steps in told]).double().mean(0).float()
    torch.testing.assert_close(told[0][2][3], mean, rtol=1e-5, atol=1e-6)
    far = scattered(CrossoverConfig(consensus_every=2, consensus_limit=0.9), 6)
    assert not any(due for steps in far for _, _, due, _ in steps)


def test_what_was_asked_for_waits_for_a_step_that_counts():
    config = CrossoverConfig(consensus_every=2, consensus_limit=0.001)
    told = scattered(config, 5, left_out={2})
    for steps in told:
        assert [due for _, _, due, _ in steps] == [False, False, True, True, False]
    assert [all_equal(told, step) for step in range(5)] == [False] * 3 + [True] * 2


def test_what_was_seen_before_all_met_asks_for_nothing():
    config = CrossoverConfig(consensus_every=2, consensus_limit=0.001, exact_every=2)
    told = scattered(config, 4)
    for steps in told:
        assert [due for _, _, due, _ in steps] == [False, True, False, True]
        assert steps[2][1] > 0.001, "as they were before"


def test_one_rank_meets_itself():
    config = CrossoverConfig(exact_every=2, consensus_every=1, consensus_limit=0.5, wire="fp8")
    ((*_, last),) = scattered(config, 3, size=1)
    assert last[1] == pytest.approx(0, abs=1e-6)
