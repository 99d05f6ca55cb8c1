"""Groups with exact averages and with shards sent in 8 bits: against NumPy, to the bit."""

import threading
from collections import defaultdict
from typing import ClassVar

import numpy as np
import pytest
import torch

from stretto.comm.bound_schedule import BufferPool
from stretto.comm.in_process_transports import run_threads
from stretto.strategies import CrossoverConfig, DPSGDConfig, SGPConfig, build_strategy
from tests.laws.test_coded_gossip import in_eight_bits
from tests.laws.test_exact_averages import EVERY, assert_equal_after_exact_steps, crossover, pushing
from tests.laws.test_gossip import CUTS, LR, Chain, initial, trained
from tests.laws.test_gossip_groups import SHAPES, Groups, assert_same


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_groups_are_equal_to_the_bit_after_an_exact_average(delay, reads):
    config = CrossoverConfig(**CUTS, seed=5, delay=delay, exact_every=EVERY, groups=3)
    history = trained(config, 6, reads=reads)
    assert_same(history, crossover(config, Groups(6, 3)))
    assert_equal_after_exact_steps(history[::2])


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_push_sum_groups_include_all_shares_in_flight(delay):
    config = SGPConfig(delay=delay, exact_every=EVERY, groups=2)
    assert_same(trained(config, 4), pushing(config, Groups(4, 2)))


@pytest.mark.parametrize(("workers", "groups"), SHAPES)
@pytest.mark.parametrize(("delay", "exact_every"), [(0, None), (1, None), (2, None), (1, EVERY)])
def test_groups_send_each_shard_in_eight_bits(workers, groups, delay, exact_every):
    config = CrossoverConfig(
        **CUTS, seed=5, delay=delay, exact_every=exact_every, groups=groups, wire="fp8"
    )
    expected = in_eight_bits(config, Groups(workers, groups), workers // groups)
    assert_same(trained(config, workers), expected)


@pytest.mark.parametrize("kind", [CrossoverConfig, DPSGDConfig])
@pytest.mark.parametrize("delay", [1, 2])
def test_eight_bits_move_no_mean_of_groups(kind, delay):
    config = kind(**CUTS, delay=delay, wire="fp8", groups=2)

    def on_rank(transport):
        strategy = build_strategy(config, transport)
        model, _ = strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=0.0))
        draw = np.random.default_rng(transport.rank // 2)
        moved = [draw.normal(size=w.shape) for w in initial()]
        with torch.no_grad():
            for parameter, more in zip(model.parameters(), moved, strict=True):
                parameter.add_(torch.from_numpy(more))
        for step in range(8):
            strategy.begin(step, 0, True, 0.0)
            strategy.after_backward()
            strategy.after_update()
        own = [p.detach().clone() for p in model.parameters()]
        strategy.consolidate()
        consolidated = [p.detach().numpy().copy() for p in model.parameters()]
        strategy.close()
        return moved, own, consolidated

    found = run_threads(4, on_rank)
    for rank, (_, own, consolidated) in enumerate(found):
        assert all(torch.equal(*pair) for pair in zip(own, found[rank - rank % 2][1], strict=True))
        for layer, first in enumerate(initial()):
            mean = np.mean([moved[layer] for moved, _, _ in found], axis=0)
            np.testing.assert_allclose(consolidated[layer], first + mean, rtol=0, atol=1e-12)


class Watched(BufferPool):
    """Records which thread uses the buffers of which lane."""

    made: ClassVar[list["Watched"]] = []

    def __init__(self):
        super().__init__()
        self.threads = defaultdict(set)
        self.made.append(self)

    def get_buffers(self, lane, *more):
        self.threads[lane].add(threading.current_thread().name)
        return super().get_buffers(lane, *more)


@pytest.mark.parametrize(("workers", "lanes"), [(4, 8), (6, 1)])
def test_no_two_threads_use_the_buffers_of_one_lane(workers, lanes, monkeypatch):
    """One of three groups has no peer, while its lane may decode for another segment."""
    monkeypatch.setattr("stretto.strategies.gossip.gossip.BufferPool", Watched)
    monkeypatch.setattr(Watched, "made", [])

    def on_rank(transport):
        config = CrossoverConfig(
            segments="coarse",
            topology="matching",
            delay=1,
            lanes=lanes,
            groups=workers // 2,
            wire="fp8",
        )
        strategy = build_strategy(config, transport)
        strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=LR))
        for step in range(6):
            strategy.begin(step, 0, True, LR)
            strategy.after_backward()
            strategy.after_update()
        strategy.consolidate()
        strategy.close()

    run_threads(workers, on_rank)
    assert len(Watched.made) == workers
    for pool in Watched.made:
        assert len(pool.threads) > 1
        assert all(len(names) == 1 for names in pool.threads.values()), pool.threads
