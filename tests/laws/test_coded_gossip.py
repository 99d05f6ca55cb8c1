"""Gossip in 8 bits: the formula in NumPy, a constant mean, and error feedback."""

import numpy as np
import pytest
import torch
from torch import nn

from stretto.comm.in_process_transports import RecordingTransport, run_threads
from stretto.strategies import CrossoverConfig, DPSGDConfig, build_strategy
from stretto.strategies.gossip.coded_wire import CodedDifferenceMixer
from stretto.topology.analysis import mixing_matrix
from tests.laws.test_exact_averages import EVERY, is_exact_step, mean_of
from tests.laws.test_gossip import (
    CUTS,
    LR,
    STEPS,
    WORKERS,
    Workers,
    assert_same,
    mix_alone,
    trained,
)

BLOCK = 256


def rounded(values):
    """Return ``values`` rounded to fp8: a power of two for each block, times e4m3."""
    flat = values.ravel().astype(np.float32)
    said = []
    for start in range(0, len(flat), BLOCK):
        block = flat[start : start + BLOCK]
        most = float(np.abs(block).max())
        scale = 2.0 ** np.ceil(np.log2(most / 464)) if most else 1.0
        eight = torch.from_numpy(block / np.float32(scale)).to(torch.float8_e4m3fn)
        said.append(eight.double().numpy() * scale)
    return np.concatenate(said).reshape(values.shape)


class Encoder:
    """One worker's reference and residual by layer, each sent in ``shards`` shards."""

    def __init__(self, weights, shards):
        self.shards = shards
        self.reset_reference(weights)

    def reset_reference(self, weights):
        self.reference = [w.copy() for w in weights]
        self.left = [np.zeros_like(w) for w in weights]

    def encode(self, weights):
        """Return Q(x - r + e) of each layer; e becomes what Q lost."""
        exact = [(x - r) + e for x, r, e in zip(weights, self.reference, self.left, strict=True)]
        sent = [self.rounded(d) for d in exact]
        self.left = [d - q for d, q in zip(exact, sent, strict=True)]
        return sent

    def rounded(self, values):
        parts = [rounded(part) for part in np.array_split(values.ravel(), self.shards)]
        return np.concatenate(parts).reshape(values.shape)


def pulled(said, topology, number):
    """Return sum of weight (q_j - q_i) for each worker and layer."""
    ranks = range(len(said))
    weights = [mixing_matrix(topology, len(said), number, layer) for layer in range(2)]
    return [
        [sum(weights[k][i, j] * (said[j][k] - said[i][k]) for j in ranks) for k in range(2)]
        for i in ranks
    ]


def add(x, change):
    for weights, more in zip(x, change, strict=True):
        for layer in range(2):
            weights[layer] = weights[layer] + more[layer]


def in_eight_bits(config, workers, shards=1):
    """Return the history of workers, or groups, that send each layer in ``shards`` shards."""
    expected, left = [], []
    encoders = [Encoder(x, shards) for x in workers.x]
    for step in range(STEPS):
        workers.adapt(step)
        if config.exact_every and is_exact_step(step):
            workers.x, left = mean_of(workers.x), []
            for encoder, x in zip(encoders, workers.x, strict=True):
                encoder.reset_reference(x)
        else:
            if config.delay and len(left) >= config.delay:
                add(workers.x, pulled(*left.pop(0)))
            said = [s.encode(x) for s, x in zip(encoders, workers.x, strict=True)]
            left.append((said, config.build_topology(), step))
            if not config.delay:
                add(workers.x, pulled(*left.pop(0)))
        expected.append(workers.copy())
    return expected


@pytest.mark.parametrize("exact_every", [None, EVERY])
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_both_ends_combine_what_was_decoded(delay, exact_every):
    config = CrossoverConfig(**CUTS, seed=5, delay=delay, wire="fp8", exact_every=exact_every)
    assert_same(trained(config), in_eight_bits(config, Workers()))


@pytest.mark.parametrize(
    "config",
    [
        CrossoverConfig(**CUTS, wire="fp8"),
        CrossoverConfig(segments="whole", topology="base", wire="fp8", delay=2, every=2),
        DPSGDConfig(wire="fp8", topology="static-exponential"),
    ],
    ids=lambda c: f"{c.kind}-{c.topology}-{c.delay}",
)
def test_eight_bits_move_no_mean(config):
    found = mix_alone(config)
    wholes = [[history[step][0] for history, _ in found] for step in range(12)]
    first, *later = ([np.mean(w, axis=0) for w in zip(*of_step, strict=True)] for of_step in wholes)
    for means in later:
        for mean, expected in zip(means, first, strict=True):
            np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-12)
    # The ranks do converge, as closely as 8 bits allow.
    begin, end = (np.std([w[0] for w in wholes[step]], axis=0).max() for step in (0, 11))
    assert end < 0.3 * begin


SIZE = 60
"""Unknowns of a regression."""


def forget_residual(mixer):
    """Load the state of a mixer back into it, with a residual of zero."""
    mixer.wait()
    state = mixer.state()
    mixer.load(state | {"residual": torch.zeros_like(state["residual"])})


def fitted(config, *, forget=False, steps=300):
    """Fit ranks' own data; return each rank's solutions after every step of the last two thirds."""
    draw = torch.Generator().manual_seed(11)
    truth = torch.randn(SIZE, generator=draw)
    inputs = torch.randn(WORKERS, 2 * SIZE, SIZE, generator=draw)
    moved = 0.3 * torch.randn(WORKERS, SIZE, 1, generator=draw)
    targets = inputs @ (truth[:, None] + moved)

    def on_rank(transport):
        strategy = build_strategy(config, transport)
        model, _ = strategy.attach(
            nn.Linear(SIZE, 1, bias=False), lambda p: torch.optim.SGD(p, lr=0.05)
        )
        with torch.no_grad():
            model.weight.zero_()
        strategy.load_local_state({})  # all begin from this model
        history = []
        for step in range(steps):
            strategy.begin(step, 0, True, 0.05)
            error = model(inputs[transport.rank]) - targets[transport.rank]
            (error.square().sum() / (2 * len(error) * WORKERS)).backward()
            strategy.after_backward()
            strategy.after_update()
            for mixer in strategy.inspect().mixers if forget else ():
                forget_residual(mixer)
            history.append(model.weight.detach()[0].clone())
        strategy.close()
        return torch.stack(history[steps // 3 :])

    return torch.stack(run_threads(WORKERS, on_rank)).double()


@pytest.mark.parametrize("kind", [CrossoverConfig, DPSGDConfig])
def test_error_feedback_sends_the_residual_of_eight_bits_later(kind):
    plain = fitted(kind(segments="whole", delay=1))
    coded = fitted(kind(segments="whole", delay=1, wire="fp8"))
    forgetful = fitted(kind(segments="whole", delay=1, wire="fp8"), forget=True)
    solution = plain.mean((0, 1))

    def off(found):
        return float((found.mean((0, 1)) - solution).norm() / solution.norm())

    assert off(coded) < 0.005
    assert off(coded) < 0.7 * off(forgetful)

    # Each rank's own solution is better over time, too.
    def own(found):
        return float((found.mean(1) - plain.mean(1)).norm() / plain.mean(1).norm())

    assert own(coded) < 0.7 * own(forgetful)


def test_a_new_reference_makes_eight_bits_finer():
    def tremble(exact_every):
        configs = (
            CrossoverConfig(segments="whole", wire=wire, exact_every=exact_every)
            for wire in ("own", "fp8")
        )
        plain, coded = (fitted(config, steps=150) for config in configs)
        return float((coded - plain).square().mean().sqrt())

    assert tremble(10) < 0.1 * tremble(None)


def bytes_sent(wire):
    """Return how many bytes a rank sends to peers in a step, of a model of 40,500 elements."""

    def on_rank(transport):
        recording = RecordingTransport(transport)
        strategy = build_strategy(CrossoverConfig(wire=wire, segments="coarse"), recording)
        layers = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(50, 10, bias=False))
        strategy.attach(layers, lambda p: torch.optim.SGD(p, lr=LR))
        recording.sent.clear()
        strategy.begin(0, 0, True, LR)
        strategy.after_backward()
        strategy.after_update()
        strategy.close()
        return sum(message.num_bytes for message in recording.sent)

    return run_threads(2, on_rank)


def test_eight_bits_are_about_a_quarter_of_thirty_two():
    assert bytes_sent("fp32") == [4 * 40_500] * 2
    # A byte for each element, and one for each block of 256 or a part of it.
    assert bytes_sent("fp8") == [40_500 + 157 + 2] * 2


def test_parameters_of_sixteen_bits_are_sent_in_eight_too():
    def on_rank(transport):
        parameter = nn.Parameter(torch.full((3,), 1.0, dtype=torch.bfloat16))
        strategy = build_strategy(CrossoverConfig(wire="fp8"), transport)
        model = nn.ParameterList([parameter])
        strategy.attach(model, lambda p: torch.optim.SGD(p, lr=LR))
        with torch.no_grad():
            parameter.add_(transport.rank)
        (mixer,) = strategy.inspect().mixers
        assert isinstance(mixer, CodedDifferenceMixer)
        mixer.start_round(0)
        mixer.finish_round()
        strategy.close()
        return parameter.detach().clone()

    for found in run_threads(2, on_rank):
        assert found.tolist() == [1.5] * 3
