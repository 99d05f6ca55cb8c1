"""Gossip equals its papers: histories against plain NumPy; means, masses and single workers."""

from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

from stretto.comm.in_process_transports import run_threads
from stretto.strategies import CrossoverConfig, DPSGDConfig, SGPConfig, build_strategy
from stretto.topology import TOPOLOGIES, make_topology
from stretto.topology.analysis import mixing_matrix, topology_from_graph

STEPS, WORKERS, LR, MOMENTUM = 20, 4, 0.01, 0.9
SAMPLES, WIDTHS = 3, (5, 4, 2)
"""Of a worker in a step; of the two layers, which are a segment each."""


def batches(workers=WORKERS, steps=STEPS):
    """Return inputs and targets by step and worker."""
    draw = np.random.default_rng(7)
    return (
        draw.normal(size=(steps, workers, SAMPLES, WIDTHS[0])),
        draw.normal(size=(steps, workers, SAMPLES, WIDTHS[2])),
    )


def initial():
    draw = np.random.default_rng(1)
    return [draw.normal(size=(o, i)) for i, o in pairwise(WIDTHS)]


def gradients(weights, x, y):
    """Return those of the mean over samples of half the squared error of two layers."""
    first, second = weights
    hidden = x @ first.T
    error = (hidden @ second.T - y) / len(x)
    return [(error @ second).T @ x, error.T @ hidden]


class Chain(nn.Module):
    """Two layers without biases, from the same weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTHS[0], WIDTHS[1], bias=False, dtype=torch.float64)
        self.second = nn.Linear(WIDTHS[1], WIDTHS[2], bias=False, dtype=torch.float64)
        with torch.no_grad():
            for layer, value in zip((self.first, self.second), initial(), strict=True):
                layer.weight.copy_(torch.from_numpy(value))

    def forward(self, x):
        return self.second(self.first(x))


def trained(config, workers=WORKERS, *, reads=False, calls=("first", "second"), see=None):
    """Train as the loop does; return each worker's weights after every step."""
    inputs, targets = batches(workers)

    def on_rank(transport):
        strategy = build_strategy(config, transport, calls=calls)
        strategy.reads_gradients = reads
        model, optimizer = strategy.attach(
            Chain(), lambda p: torch.optim.SGD(p, lr=LR, momentum=MOMENTUM)
        )
        history = []
        for step in range(STEPS):
            strategy.begin(step, 0, True, LR)
            x, y = (torch.from_numpy(a[step, transport.rank]) for a in (inputs, targets))
            loss = (model(x) - y).square().sum() / 2
            (loss / (SAMPLES * workers)).backward()
            step_gradients = strategy.after_backward()
            if not step_gradients.is_applied:
                optimizer.step()
                optimizer.zero_grad()
            strategy.after_update()
            history.append(seen(model))
            if see is not None:
                see(strategy, transport.rank, step)
        strategy.close()
        return history

    return run_threads(workers, on_rank)


def seen(model):
    """Return the weights that the next forward uses: a forward waits for what has to arrive."""
    with torch.no_grad():
        model(torch.zeros(1, WIDTHS[0], dtype=torch.float64))
    return [layer.weight.detach().numpy().copy() for layer in (model.first, model.second)]


def assert_same(history, expected):
    for rank, steps in enumerate(history):
        for step, weights in enumerate(steps):
            for layer, weight in enumerate(weights):
                np.testing.assert_allclose(
                    weight,
                    expected[step][rank][layer],
                    rtol=0,
                    atol=1e-12,
                    err_msg=f"{step} {rank}",
                )


class Workers:
    """Workers in NumPy: weights and momentum of each, by layer."""

    def __init__(self, workers=WORKERS):
        self.x = [initial() for _ in range(workers)]
        self.u = [[np.zeros_like(w) for w in initial()] for _ in range(workers)]
        self.inputs, self.targets = batches(workers)

    def directions(self, step, at=None):
        """Return what each worker would go along, its momentum brought up to date."""
        for rank, weights in enumerate(at or self.x):
            found = gradients(weights, self.inputs[step, rank], self.targets[step, rank])
            self.u[rank] = [MOMENTUM * u + g for u, g in zip(self.u[rank], found, strict=True)]
        return self.u

    def adapt(self, step, at=None):
        for x, u in zip(self.x, self.directions(step, at), strict=True):
            for layer in range(2):
                x[layer] = x[layer] - LR * u[layer]

    def copy(self):
        return [[w.copy() for w in weights] for weights in self.x]


def mixed(x, topology, step):
    return [
        [
            sum(
                mixing_matrix(topology, len(x), step, layer)[i, j] * x[j][layer]
                for j in range(len(x))
            )
            for layer in range(2)
        ]
        for i in range(len(x))
    ]


CUTS = {"segments": "coarse"}


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("calls", [("first", "second"), ()])
def test_crossover_averages_each_segment_with_a_peer_drawn_for_it(reads, calls):
    config = CrossoverConfig(**CUTS, seed=5)
    workers, expected = Workers(), []
    for step in range(STEPS):
        workers.adapt(step)
        workers.x = mixed(workers.x, config.build_topology(), step)
        expected.append(workers.copy())
    assert_same(trained(config, reads=reads, calls=calls), expected)
    # Layers do have different peers.
    pairs = [
        mixing_matrix(config.build_topology(), WORKERS, step, layer)
        for step in range(STEPS)
        for layer in range(2)
    ]
    assert any((pairs[i] != pairs[i + 1]).any() for i in range(0, len(pairs), 2))


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_values_received_late_count_as_the_difference_when_they_were_sent(delay):
    config = CrossoverConfig(**CUTS, delay=delay)
    workers, expected, left = Workers(), [], []
    for step in range(STEPS):
        workers.adapt(step)
        if step >= delay:
            number, was = left[step - delay]
            then = mixed(was, config.build_topology(), number)
            for x, old, new in zip(workers.x, was, then, strict=True):
                for layer in range(2):
                    x[layer] = x[layer] + new[layer] - old[layer]
        left.append((step, workers.copy()))
        expected.append(workers.copy())
    assert_same(trained(config), expected)


def test_dpsgd_adds_an_update_to_what_all_had_before_it():
    config = DPSGDConfig()
    assert mixing_matrix(config.build_topology(), WORKERS)[0, 1] == pytest.approx(1 / 3)
    workers, expected = Workers(), []
    for step in range(STEPS):
        u = workers.directions(step)
        workers.x = [
            [m - LR * d for m, d in zip(mix, direction, strict=True)]
            for mix, direction in zip(mixed(workers.x, config.build_topology(), 0), u, strict=True)
        ]
        expected.append(workers.copy())
    assert_same(trained(config), expected)


IRREGULAR = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2), (2, 3), (3, 0)])
"""Rank 0 has two senders and receivers, 1 and 3 have one of each: rows do not sum to one."""


class Irregular(SGPConfig):
    """SGP on a graph of the tests' own."""

    def build_topology(self):
        return topology_from_graph(IRREGULAR)


def sgp(config, workers):
    """Return the history of x, w and z = x / w as the paper has it, and the masses."""
    size, expected, masses = len(workers.x), [], []
    w, rounds_in_flight = np.ones(size), []
    z = workers.copy()
    for step in range(STEPS):
        workers.adapt(step, at=z)
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
        masses.append(w.copy())
    return expected, masses


def push(x, w, p):
    """Send p_ji x_i and p_ji w_i, keep the rest; return what is on its way and what is left."""
    n = len(x)
    sent = [
        [sum(p[j, i] * x[i][k] for i in range(n) if i != j) for k in range(2)] for j in range(n)
    ]
    mass = [sum(p[j, i] * w[i] for i in range(n) if i != j) for j in range(n)]
    for i in range(n):
        x[i] = [p[i, i] * value for value in x[i]]
    return sent, mass, np.array([p[i, i] * w[i] for i in range(n)])


def receive(x, w, arriving):
    sent, mass, _ = arriving
    for i in range(len(x)):
        x[i] = [value + more for value, more in zip(x[i], sent[i], strict=True)]
    return w + np.array(mass)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("kind", [SGPConfig, Irregular])
def test_sgp_pushes_shares_and_divides_by_their_mass(kind, delay, reads):
    config = kind(delay=delay)
    expected, masses = sgp(config, Workers())
    history = trained(config, reads=reads)
    assert_same(history, expected)
    consensus_distance = max(np.ptp(of_step) for of_step in masses)
    assert consensus_distance > 0.01 or kind is SGPConfig, (
        "masses differ where rows do not sum to 1"
    )


CONFIGS = [
    *(CrossoverConfig(**CUTS, delay=delay) for delay in (0, 1, 2)),
    CrossoverConfig(segments="whole", topology="base", every=3),
    CrossoverConfig(**CUTS, wire="fp32", delay=1),
    DPSGDConfig(topology="static-exponential"),
    SGPConfig(delay=1),
    Irregular(),
    Irregular(delay=2),
]


def mix_alone(config, workers=WORKERS, steps=12):
    """Mix different models without learning; return values and mass of each worker by step."""

    def on_rank(transport):
        strategy = build_strategy(config, transport)
        model, _ = strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=0.0))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(transport.rank)
        records = []
        for step in range(steps):
            strategy.begin(step, 0, True, 0.0)
            strategy.after_backward()
            strategy.after_update()
            mixers = strategy.inspect().mixers
            for mixer in mixers:
                mixer.wait()
            values_to_average = [
                value.numpy() for mixer in mixers for value in mixer.values_to_average()
            ]
            records.append(
                (values_to_average, sum(mixer.mass + in_flight(mixer) for mixer in mixers))
            )
        strategy.consolidate()
        consolidated = [p.detach().numpy().copy() for p in model.parameters()]
        strategy.close()
        return records, consolidated

    return run_threads(workers, on_rank)


def in_flight(mixer):
    """Return the mass that a worker has received and not applied."""
    state = mixer.state()
    rounds = [change for name, change in state.items() if name.startswith("round-")]
    return sum(float(change[-1]) for change in rounds) if "mass" in state else 0.0


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.kind}-{c.topology}-{c.delay}")
def test_rounds_move_no_mean_and_lose_no_mass(config):
    found = mix_alone(config)
    expected = [w + 1.5 for w in initial()]
    close = 1e-6 if config.wire == "fp32" else 1e-12
    for step in range(12):
        wholes = [records[step][0] for records, _ in found]
        order = slice(None, None, -1) if config.segments == "coarse" else slice(None)
        means = [np.mean(of_ranks, axis=0) for of_ranks in zip(*wholes, strict=True)][order]
        for mean, value in zip(means, expected, strict=True):
            np.testing.assert_allclose(mean, value, rtol=0, atol=close)
        segments = 2 if config.segments == "coarse" else 1
        assert sum(records[step][1] for records, _ in found) == pytest.approx(
            4 * segments, abs=1e-12
        )
    for _, consolidated in found:
        for value, mean in zip(consolidated, expected, strict=True):
            np.testing.assert_allclose(value, mean, rtol=0, atol=close)


def test_one_worker_is_plain_sgd_and_all_peers_are_synchronous_sgd():
    workers, expected = Workers(1), []
    for step in range(STEPS):
        workers.adapt(step)
        expected.append(workers.copy())
    for config in (CrossoverConfig(), DPSGDConfig(), SGPConfig()):
        assert_same(trained(config, 1), expected)
    workers, expected = Workers(), []
    for step in range(STEPS):
        u = workers.directions(step)
        mean = [np.mean([of_rank[layer] for of_rank in u], axis=0) for layer in range(2)]
        workers.x = [[x - LR * m for x, m in zip(workers.x[0], mean, strict=True)]] * WORKERS
        expected.append(workers.copy())
    assert_same(trained(CrossoverConfig(topology="complete")), expected)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_that_fits_can_be_gossiped_on(name):
    size = 4
    if make_topology(name).size_error(size):
        pytest.skip(f"{name} has no {size} ranks")
    found = mix_alone(CrossoverConfig(topology=name, **CUTS), size, steps=40)
    first, *others = (records[-1][0] for records, _ in found)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-3)


class Rarely(Chain):
    """Has a parameter that only some forwards use, and one that none does."""

    def __init__(self):
        super().__init__()
        self.rare = nn.Parameter(torch.ones(WIDTHS[2], dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(WIDTHS[2], dtype=torch.float64))

    def forward(self, x, *, rare):
        out = super().forward(x)
        return out * self.rare if rare else out


def in_two_pieces(config, *, reads):
    """Train with two micro-batches a step, of which the first alone uses every parameter."""
    inputs, targets = batches()

    def on_rank(transport):
        strategy = build_strategy(config, transport)
        strategy.reads_gradients = reads
        model, optimizer = strategy.attach(
            Rarely(), lambda p: torch.optim.SGD(p, lr=LR, momentum=MOMENTUM)
        )
        for step in range(5):
            x, y = (torch.from_numpy(a[step, transport.rank]) for a in (inputs, targets))
            for micro in range(2):
                strategy.begin(step, micro, micro == 1, LR)
                error = model(x[micro::2], rare=micro == 0) - y[micro::2]
                (error.square().sum() / (2 * SAMPLES * WORKERS)).backward()
            if not strategy.after_backward().is_applied:
                optimizer.step()
                optimizer.zero_grad()
            strategy.after_update()
        strategy.close()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    return run_threads(WORKERS, on_rank)


@pytest.mark.parametrize("delay", [0, 1])
def test_updating_segments_in_backward_equals_updating_them_at_its_end(delay):
    config = CrossoverConfig(**CUTS, delay=delay)
    early, late = (in_two_pieces(config, reads=reads) for reads in (False, True))
    assert not torch.equal(early[0]["rare"], torch.ones(WIDTHS[2], dtype=torch.float64))
    for mine, other in zip(early, late, strict=True):
        for name, value in mine.items():
            torch.testing.assert_close(value, other[name], rtol=0, atol=1e-12)


def test_consolidate_gives_the_mean_and_each_rank_gets_its_own_back():
    def on_rank(transport):
        strategy = build_strategy(CrossoverConfig(**CUTS, delay=1), transport)
        model, _ = strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=LR))
        with torch.no_grad():
            model.first.weight.add_(transport.rank)
        own = model.first.weight.detach().clone()
        strategy.consolidate()
        mean, consensus_distance = (
            model.first.weight.detach().clone(),
            strategy.consensus_distance(),
        )
        strategy.consolidate()
        again = model.first.weight.detach().clone()
        strategy.restore_local()
        back = model.first.weight.detach().clone()
        strategy.consolidate()
        with torch.no_grad():
            model.first.weight.fill_(3.0)  # other weights are loaded
        strategy.begin(0, 0, True, LR)
        loaded = model.first.weight.detach().clone()
        strategy.close()
        return own, mean, again, back, loaded, consensus_distance

    first = torch.from_numpy(initial()[0])
    for own, mean, again, back, loaded, consensus_distance in run_threads(WORKERS, on_rank):
        torch.testing.assert_close(mean, first + 1.5, rtol=0, atol=1e-12)
        torch.testing.assert_close(again, mean, rtol=0, atol=1e-12)
        assert torch.equal(back, own)
        assert torch.equal(loaded, torch.full_like(own, 3.0))
        norm = sum(float((w + 1.5 * (i == 0)).__pow__(2).sum()) for i, w in enumerate(initial()))
        assert consensus_distance == pytest.approx((1.25 * first.numel() / norm) ** 0.5, rel=1e-9)


def mixed_gradients(workers, topology, step):
    """Return each worker's gradients at its own weights, averaged with those of its peers."""
    own = [
        gradients(x, workers.inputs[step, rank], workers.targets[step, rank])
        for rank, x in enumerate(workers.x)
    ]
    return mixed(own, topology, step)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("topology", ["derangement", "ring", "complete"])
def test_mixed_gradients_are_stepped_by_and_parameters_stay_each_workers_own(topology, reads):
    config = CrossoverConfig(**CUTS, topology=topology, mix="gradients", seed=3)
    workers, expected = Workers(), []
    for step in range(STEPS):
        for rank, found in enumerate(mixed_gradients(workers, config.build_topology(), step)):
            pairs = zip(workers.u[rank], found, strict=True)
            workers.u[rank] = [MOMENTUM * u + g for u, g in pairs]
            moved = zip(workers.x[rank], workers.u[rank], strict=True)
            workers.x[rank] = [x - LR * u for x, u in moved]
        expected.append(workers.copy())
    assert_same(trained(config, reads=reads), expected)
    first = [x[0] for x in workers.x]
    consensus_distance = max(np.abs(x - first[0]).max() for x in first)
    assert consensus_distance < 1e-12 if topology == "complete" else consensus_distance > 1e-4, (
        "nothing pulls them together"
    )


def test_gradients_that_all_share_are_those_of_synchronous_sgd():
    config = CrossoverConfig(**CUTS, topology="complete", mix="gradients")
    workers, expected = Workers(), []
    for step in range(STEPS):
        u = workers.directions(step)
        mean = [np.mean([of_rank[layer] for of_rank in u], axis=0) for layer in range(2)]
        workers.x = [[x - LR * m for x, m in zip(workers.x[0], mean, strict=True)]] * WORKERS
        expected.append(workers.copy())
    assert_same(trained(config), expected)


def test_between_rounds_workers_step_by_gradients_of_their_own():
    config = CrossoverConfig(**CUTS, topology="complete", mix="gradients", every=STEPS)
    workers, expected = Workers(), []
    for step in range(STEPS - 1):
        workers.adapt(step)
        expected.append(workers.copy())
    assert_same([history[:-1] for history in trained(config)], expected)


@pytest.mark.parametrize("reads", [False, True])
def test_what_one_worker_alone_has_used_its_peers_update_too(reads):
    def on_rank(transport):
        config = CrossoverConfig(**CUTS, topology="complete", mix="gradients")
        strategy = build_strategy(config, transport)
        strategy.reads_gradients = reads
        model, optimizer = strategy.attach(Rarely(), lambda p: torch.optim.SGD(p, lr=LR))
        strategy.begin(0, 0, True, LR)
        if transport.rank < 2:  # the others have no samples
            x = torch.ones(1, WIDTHS[0], dtype=torch.float64)
            model(x, rare=transport.rank == 1).sum().backward()
        strategy.after_backward()
        had = {name: p.grad is not None for name, p in model.named_parameters()}
        optimizer.step()
        strategy.after_update()
        strategy.close()
        return had, model.rare.detach(), model.unused.detach()

    found = run_threads(WORKERS, on_rank)
    for had, rare, unused in found:
        assert had == {"first.weight": True, "second.weight": True, "rare": True, "unused": False}
        torch.testing.assert_close(rare, found[1][1], rtol=0, atol=1e-12)
        assert not torch.equal(rare, torch.ones_like(rare))
        assert torch.equal(unused, torch.ones_like(unused))


def clipped(found, most):
    """Return gradients scaled down together, where their norm is above ``most``."""
    norm = np.sqrt(sum((g**2).sum() for g in found))
    return [g * min(1.0, most / (norm + 1e-6)) for g in found]


def in_the_loop(transport, config, *, most, pieces):
    """Train as the loop does, in ``pieces`` micro-batches a step; return weights and rounds."""
    inputs, targets = batches()
    strategy = build_strategy(config, transport, calls=("first", "second"))
    strategy.reads_gradients = most is not None
    model, optimizer = strategy.attach(
        Chain(), lambda p: torch.optim.SGD(p, lr=LR, momentum=MOMENTUM)
    )
    history, steps, rounds = [], [], []
    optimizer.register_step_pre_hook(lambda *_: steps.append(None))
    for mixer in strategy.inspect().mixers:
        mixer.start_round = counting(mixer.start_round, rounds)
    for step in range(STEPS):
        x, y = (torch.from_numpy(a[step, transport.rank]) for a in (inputs, targets))
        cut = list(zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True))
        for micro, (a, b) in enumerate(cut):
            strategy.begin(step, micro, micro == pieces - 1, LR)
            loss = (model(a) - b).square().sum() / 2
            (loss / (SAMPLES * WORKERS)).backward()
        step_gradients = strategy.after_backward()
        if not step_gradients.is_applied:
            if most is not None:
                step_gradients.clip_(most)
            optimizer.step()
            optimizer.zero_grad()
        strategy.after_update()
        history.append(seen(model))
    strategy.close()
    return history, len(steps), len(rounds)


def counting(start_round, calls):
    def counted(number):
        calls.append(number)
        start_round(number)

    return counted


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("most", [None, 4.0, 1000.0])
def test_a_step_of_several_pieces_is_one_update_and_one_round_clipped_by_its_own_norm(most, pieces):
    config = CrossoverConfig(**CUTS, seed=5)
    workers, expected, scaled = Workers(), [], 0
    for step in range(STEPS):
        for rank, x in enumerate(workers.x):
            found = gradients(x, workers.inputs[step, rank], workers.targets[step, rank])
            kept = found if most is None else clipped(found, most)
            scaled += kept[0] is not found[0] and not np.allclose(kept[0], found[0])
            pairs = zip(workers.u[rank], kept, strict=True)
            workers.u[rank] = [MOMENTUM * u + g for u, g in pairs]
            workers.x[rank] = [w - LR * u for w, u in zip(x, workers.u[rank], strict=True)]
        workers.x = mixed(workers.x, config.build_topology(), step)
        expected.append(workers.copy())
    records = run_threads(WORKERS, lambda c: in_the_loop(c, config, most=most, pieces=pieces))
    assert_same([history for history, _, _ in records], expected)
    # If gradients are read first, one optimizer step updates all segments; else each has its own.
    updates = STEPS * (2 if most is None else 1)
    assert {(steps, rounds) for _, steps, rounds in records} == {(updates, STEPS * 2)}
    assert (scaled > 0) == (most == 4.0)
    assert most != 4.0 or scaled < STEPS * WORKERS, "some are below"
