"""Groups that meet now and then, and tell their shards in eight bits: against NumPy, to the bit."""

import threading
from collections import defaultdict

import numpy as np
import pytest
import torch

from stretto.comm.errand import Scratch
from stretto.comm.local import run_local
from stretto.strategy import CrossoverConfig, DPSGDConfig, SGPConfig, build_strategy
from tests.laws.test_coded_gossip import in_eight_bits
from tests.laws.test_gossip import CUTS, LR, Chain, initial, trained
from tests.laws.test_gossip_groups import SHAPES, Groups, assert_same
from tests.laws.test_together import EVERY, assert_equal_where_they_met, crossover, pushing


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_groups_that_meet_are_equal_to_the_bit(delay, reads):
    config = CrossoverConfig(**CUTS, seed=5, delay=delay, exact_every=EVERY, groups=3)
    history = trained(config, 6, reads=reads)
    assert_same(history, crossover(config, Groups(6, 3)))
    assert_equal_where_they_met(history[::2])


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_groups_that_push_count_all_that_is_under_way(delay):
    config = SGPConfig(delay=delay, exact_every=EVERY, groups=2)
    assert_same(trained(config, 4), pushing(config, Groups(4, 2)))


@pytest.mark.parametrize(("workers", "groups"), SHAPES)
@pytest.mark.parametrize(("delay", "exact_every"), [(0, None), (1, None), (2, None), (1, EVERY)])
def test_groups_tell_each_shard_in_eight_bits(workers, groups, delay, exact_every):
    config = CrossoverConfig(
        **CUTS, seed=5, delay=delay, exact_every=exact_every, groups=groups, wire="fp8"
    )
    expected = in_eight_bits(config, Groups(workers, groups), workers // groups)
    assert_same(trained(config, workers), expected)


@pytest.mark.parametrize("kind", [CrossoverConfig, DPSGDConfig])
@pytest.mark.parametrize("delay", [1, 2])
def test_eight_bits_move_no_mean_of_groups(kind, delay):
    config = kind(**CUTS, delay=delay, wire="fp8", groups=2)

    def on_rank(channel):
        strategy = build_strategy(config, channel)
        model, _ = strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=0.0))
        draw = np.random.default_rng(channel.rank // 2)
        moved = [draw.normal(size=w.shape) for w in initial()]
        with torch.no_grad():
            for parameter, more in zip(model.parameters(), moved, strict=True):
                parameter.add_(torch.from_numpy(more))
        for step in range(8):
            strategy.begin(step, 0, True, 0.0)
            strategy.after_backward()
            strategy.after_update()
        own = [p.detach().clone() for p in model.parameters()]
        strategy.settle()
        settled = [p.detach().numpy().copy() for p in model.parameters()]
        strategy.close()
        return moved, own, settled

    found = run_local(4, on_rank)
    for rank, (_, own, settled) in enumerate(found):
        assert all(torch.equal(*pair) for pair in zip(own, found[rank - rank % 2][1], strict=True))
        for layer, first in enumerate(initial()):
            mean = np.mean([moved[layer] for moved, _, _ in found], axis=0)
            np.testing.assert_allclose(settled[layer], first + mean, rtol=0, atol=1e-12)


class Watched(Scratch):
    """Notes who works in which part of it."""

    def __init__(self):
        super().__init__()
        self.threads = defaultdict(set)

    def cut(self, lane, *more):
        self.threads[lane].add(threading.current_thread().name)
        return super().cut(lane, *more)


@pytest.mark.parametrize(("workers", "lanes"), [(4, 8), (6, 1)])
def test_no_two_threads_work_in_one_place(workers, lanes):
    """Of three groups one hears nobody, while its lane may decode for another segment."""

    def on_rank(channel):
        config = CrossoverConfig(
            segments="coarse",
            topology="matching",
            delay=1,
            lanes=lanes,
            groups=workers // 2,
            wire="fp8",
        )
        strategy = build_strategy(config, channel)
        strategy._scratch = watched = Watched()
        strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=LR))
        for step in range(6):
            strategy.begin(step, 0, True, LR)
            strategy.after_backward()
            strategy.after_update()
        strategy.settle()
        strategy.close()
        return watched.threads

    for threads in run_local(workers, on_rank):
        assert len(threads) > 1
        assert all(len(names) == 1 for names in threads.values()), threads
