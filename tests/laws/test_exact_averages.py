"""Exact averages in gossip: histories against plain NumPy, and when averages are requested."""

import numpy as np
import pytest
import torch
from torch import nn

import stretto
from stretto.comm.in_process_transports import RecordingTransport, run_threads
from stretto.strategies import CrossoverConfig, DPSGDConfig, SGPConfig, build_strategy
from stretto.topology.analysis import mixing_matrix
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


def is_exact_step(step):
    return (step + 1) % EVERY == 0


def mean_of(x):
    """Return every worker's weights as the mean of all."""
    means = [np.mean([weights[layer] for weights in x], axis=0) for layer in range(2)]
    return [[mean.copy() for mean in means] for _ in x]


def crossover(config, workers):
    """Return the history with exact averages now and then, which drop rounds in flight."""
    expected, left = [], []
    for step in range(STEPS):
        workers.adapt(step)
        if is_exact_step(step):
            workers.x, left = mean_of(workers.x), []
        elif not config.delay:
            workers.x = mixed(workers.x, config.build_topology(), step)
        else:
            for number, was in left:
                then = mixed(was, config.build_topology(), number)
                for x, old, new in zip(workers.x, was, then, strict=True):
                    for layer in range(2):
                        x[layer] = x[layer] + new[layer] - old[layer]
            left = [(step, workers.copy())]
        expected.append(workers.copy())
    return expected


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_an_exact_average_of_crossover_drops_rounds_in_flight(delay, reads):
    config = CrossoverConfig(**CUTS, seed=5, delay=delay, exact_every=EVERY)
    history = trained(config, reads=reads)
    assert_same(history, crossover(config, Workers()))
    assert_equal_after_exact_steps(history)


def assert_equal_after_exact_steps(history):
    first, *others = history
    for step in range(STEPS):
        same = all(
            np.array_equal(mine, theirs)
            for other in others
            for mine, theirs in zip(first[step], other[step], strict=True)
        )
        assert same == is_exact_step(step), step


def pushing(config, workers):
    """Return the history with exact averages, after which masses are 1 again."""
    size, expected = len(workers.x), []
    w, rounds_in_flight = np.ones(size), []
    z = workers.copy()
    for step in range(STEPS):
        workers.adapt(step, at=z)
        if is_exact_step(step):
            for arriving in rounds_in_flight:
                w = receive(workers.x, w, arriving)
            assert w.sum() == pytest.approx(size)
            workers.x, w, rounds_in_flight = mean_of(workers.x), np.ones(size), []
        else:
            if config.delay and len(rounds_in_flight) >= config.delay:
                w = receive(workers.x, w, rounds_in_flight.pop(0))
            rounds_in_flight.append(
                push(workers.x, w, mixing_matrix(config.build_topology(), size, step))
            )
            w = rounds_in_flight[-1][2]
            if not config.delay:
                w = receive(workers.x, w, rounds_in_flight.pop(0))
        z = [[value / mass for value in x] for x, mass in zip(workers.x, w, strict=True)]
        expected.append([[value.copy() for value in weights] for weights in z])
    return expected


@pytest.mark.parametrize("kind", [SGPConfig, Irregular])
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_an_exact_average_of_sgp_includes_all_shares_in_flight(kind, delay):
    config = kind(delay=delay, exact_every=EVERY)
    masses = []

    def see(strategy, rank, step):
        masses.append((step, strategy.inspect().mixers[0].mass))

    history = trained(config, see=see)
    assert_same(history, pushing(config, Workers()))
    assert_equal_after_exact_steps(history)
    assert all(mass == 1.0 for step, mass in masses if is_exact_step(step))


def test_momentum_stays_each_ranks_own():
    def on_rank(transport):
        strategy = build_strategy(DPSGDConfig(exact_every=1), transport)
        model, optimizer = strategy.attach(
            Chain(), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)
        )
        strategy.begin(0, 0, True, LR)
        model(torch.full((1, 5), transport.rank + 1.0, dtype=torch.float64)).sum().backward()
        strategy.after_backward()
        strategy.after_update()
        strategy.close()
        weight = model.first.weight
        return weight.detach().clone(), optimizer.state[weight]["momentum_buffer"].clone()

    (one, mine), (other, theirs) = run_threads(2, on_rank)
    assert torch.equal(one, other)
    assert not torch.equal(mine, theirs)


def test_a_users_own_loop_averages_exactly_as_well():
    def on_rank(transport):
        config = CrossoverConfig(delay=1, exact_every=2, consensus_every=1)
        model, optimizer = stretto.distribute(
            Chain(), lambda p: torch.optim.SGD(p, lr=LR), config, transport=transport
        )
        found = []
        for _ in range(4):
            model(torch.full((1, 5), transport.rank + 1.0, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(model.first.weight.detach().clone())
        return found

    pairs = zip(*run_threads(2, on_rank), strict=True)
    assert [torch.equal(*pair) for pair in pairs] == [False, True, False, True]


def big():
    """Return about 100,000 parameters in segments of very different sizes."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(400, 200), nn.Linear(200, 100), nn.Linear(100, 5, bias=False))


def scattered(config, steps, *, size=4, noise=0.01, see=lambda *_: None, skipped=()):
    """Mix different models without learning; return a record of each rank for every step."""

    def on_rank(transport):
        strategy = build_strategy(config, transport)
        model, _ = strategy.attach(big(), lambda p: torch.optim.SGD(p, lr=0.0))
        draw = torch.Generator().manual_seed(transport.rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn(parameter.shape, generator=draw))
        records = []
        for step in range(steps):
            strategy.consolidate()
            full = strategy.consensus_distance()
            strategy.restore_local()
            strategy.begin(step, 0, True, 0.0)
            due = strategy.inspect().consensus.due
            step_gradients = strategy.after_backward(update=step not in skipped)
            if step not in skipped:
                strategy.after_update()
            see(strategy)
            weights = torch.cat([p.detach().flatten() for p in model.parameters()])
            records.append((full, step_gradients.consensus_distance, due, weights))
        strategy.close()
        return records

    return run_threads(size, on_rank)


@pytest.mark.parametrize(("share", "close"), [(0.001, 0.1), (0.01, 0.03), (1.0, 1e-6)])
@pytest.mark.parametrize("cut", ["whole", "coarse"])
@pytest.mark.parametrize("kind", [CrossoverConfig, SGPConfig])
def test_a_sample_estimates_the_consensus_distance(kind, cut, share, close):
    config = kind(segments=cut, consensus_every=2, consensus_sample=share)
    records = scattered(config, 5)
    for steps in records:
        assert [step[1] for step in steps] == [step[1] for step in records[0]], "equal on all ranks"
        consensus_distance = [step[1] for step in steps]
        assert consensus_distance[0] is consensus_distance[1] is consensus_distance[3] is None
        # Sampled at the beginning of steps 1 and 3; read a step later.
        assert consensus_distance[2] == pytest.approx(steps[1][0], rel=close)
        assert consensus_distance[4] == pytest.approx(steps[3][0], rel=close, abs=1e-7)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("reads", [False, True])
def test_what_is_measured_is_what_a_step_begins_with(reads, delay):
    found = {}

    def see(strategy, rank, step):
        if rank == 0:
            found[step] = float(strategy.inspect().consensus.state()["apart"])

    config = CrossoverConfig(**CUTS, delay=delay, consensus_every=1, consensus_sample=1.0)
    history = trained(config, reads=reads, see=see)
    for step in range(1, STEPS):
        before = [[w.ravel() for w in steps[step - 1]] for steps in history]
        x = np.array([np.concatenate(weights) for weights in before])
        far = ((x - x.mean(0)) ** 2).sum() / WORKERS / (x.mean(0) ** 2).sum()
        assert found[step] == pytest.approx(far**0.5, rel=1e-6)


def test_received_values_are_measured_on_a_rank_without_samples():
    def on_rank(transport):
        config = CrossoverConfig(consensus_every=2, consensus_sample=1.0)
        strategy = build_strategy(config, transport, calls=("first", "second"))
        model, _ = strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=LR))
        with torch.no_grad():
            model.first.weight.add_(transport.rank)
        for step in range(2):  # no forward, which would wait
            strategy.begin(step, 0, True, LR)
            strategy.after_backward()
            strategy.after_update()
        strategy.begin(2, 0, True, LR)
        strategy.close()
        return strategy.inspect().consensus.consensus_distance

    assert run_threads(2, on_rank) == [pytest.approx(0, abs=1e-7)] * 2


def test_a_step_with_an_exact_average_has_no_round():
    def on_rank(transport):
        recording = RecordingTransport(transport)
        strategy = build_strategy(CrossoverConfig(delay=1, exact_every=2), recording)
        strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=LR))
        records = []
        for step in range(4):
            recording.sent.clear()
            strategy.begin(step, 0, True, LR)
            strategy.after_backward()
            strategy.after_update()
            for mixer in strategy.inspect().mixers:
                mixer.wait()
            records.append(sorted({message.peer < 0 for message in recording.sent}))
        strategy.close()
        return records

    assert run_threads(2, on_rank) == [[[False], [True]] * 2] * 2


def all_equal(records, step):
    return all(torch.equal(steps[step][3], records[0][step][3]) for steps in records)


@pytest.mark.parametrize("settings", [{}, {"delay": 1}, {"delay": 1, "wire": "fp8"}], ids=str)
def test_above_the_limit_all_average_in_the_same_step(settings):
    config = CrossoverConfig(**settings, consensus_every=2, consensus_limit=0.001)
    records = scattered(config, 6)
    dues = [[due for _, _, due, _ in steps] for steps in records]
    # Sampled in step 1, read in step 2; later the models are equal.
    assert dues == [[False, False, True, False, False, False]] * 4
    assert [all_equal(records, step) for step in range(6)] == [False] * 2 + [True] * 4
    mean = torch.stack([steps[1][3] for steps in records]).double().mean(0).float()
    torch.testing.assert_close(records[0][2][3], mean, rtol=1e-5, atol=1e-6)
    far = scattered(CrossoverConfig(consensus_every=2, consensus_limit=0.9), 6)
    assert not any(due for steps in far for _, _, due, _ in steps)


def test_a_requested_average_waits_for_a_step_that_is_not_skipped():
    config = CrossoverConfig(consensus_every=2, consensus_limit=0.001)
    records = scattered(config, 5, skipped={2})
    for steps in records:
        assert [due for _, _, due, _ in steps] == [False, False, True, True, False]
    assert [all_equal(records, step) for step in range(5)] == [False] * 3 + [True] * 2


def test_a_measurement_from_before_an_average_requests_nothing():
    config = CrossoverConfig(consensus_every=2, consensus_limit=0.001, exact_every=2)
    records = scattered(config, 4)
    for steps in records:
        assert [due for _, _, due, _ in steps] == [False, True, False, True]
        assert steps[2][1] > 0.001, "as they were before"


def test_one_rank_averages_with_itself():
    config = CrossoverConfig(exact_every=2, consensus_every=1, consensus_limit=0.5, wire="fp8")
    ((*_, last),) = scattered(config, 3, size=1)
    assert last[1] == pytest.approx(0, abs=1e-6)
