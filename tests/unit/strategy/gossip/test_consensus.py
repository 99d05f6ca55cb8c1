"""Which coordinates are looked at, and what sums over them say."""

import math

import numpy as np
import pytest
import torch

from stretto.comm.local import run_local
from stretto.strategy.gossip import consensus
from stretto.strategy.gossip.consensus import FEWEST, Consensus, chosen, distance


def test_a_coordinate_is_looked_at_for_its_index_alone(monkeypatch):
    whole = chosen(0, 200_000, 0.01)
    assert len(whole) == pytest.approx(2_000, rel=0.1)
    assert (np.diff(whole) > 0).all()
    halves = [chosen(0, 100_000, 0.01), 100_000 + chosen(100_000, 100_000, 0.01)]
    assert np.array_equal(np.concatenate(halves), whole)
    monkeypatch.setattr(consensus, "_AT_ONCE", 999)
    assert np.array_equal(chosen(0, 200_000, 0.01), whole)


@pytest.mark.parametrize("count", [0, 1, FEWEST - 1, FEWEST, 100])
def test_some_of_every_segment_are_looked_at(count):
    found = chosen(17, count, 1e-9)
    assert len(found) == len(set(found.tolist())) == min(FEWEST, count)
    assert all(0 <= place < count for place in found)


def test_no_neighbours_are_preferred():
    gaps = np.diff(chosen(0, 1_000_000, 0.01))
    assert gaps.mean() == pytest.approx(100, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "as gaps of a fair draw"


def told(x, weights):
    """Return what ranks with rows of ``x`` add up."""
    squares = float((weights * x**2).sum())
    return x.sum(0), weights, squares, float((x**2).sum()), len(x)


def test_all_coordinates_give_the_distance_itself():
    x = np.random.default_rng(0).normal(size=(3, 50))
    mean = x.mean(0)
    wanted = math.sqrt(((x - mean) ** 2).sum() / 3 / (mean**2).sum())
    assert distance(*told(x, np.ones(50))) == pytest.approx(wanted, rel=1e-12)


def test_equal_models_are_not_apart_and_no_mean_is_infinitely_far():
    assert distance(*told(np.ones((3, 4)), np.ones(4))) == pytest.approx(0, abs=1e-7)
    assert distance(*told(np.zeros((3, 4)), np.ones(4))) == 0
    assert distance(*told(np.array([[1.0], [-1.0]]), np.ones(1))) == math.inf
    assert math.isnan(distance(*told(np.full((2, 1), math.nan), np.ones(1))))


def test_a_model_is_looked_at_however_it_lies_and_whatever_is_empty():
    image = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    segments = [[torch.ones(3), torch.empty(0), image], [torch.empty(0)]]

    def on_rank(channel):
        look = Consensus(segments, 1.0, channel)
        assert look.read() is None
        look.see(0)
        look.see(1)
        look.tell()
        seen = look._seen.clone()
        return look.read(), look.read(), seen

    for apart, again, seen in run_local(2, on_rank):
        assert apart == pytest.approx(0, abs=1e-7)
        assert again is None
        assert seen.tolist() == [1.0] * 3 + list(range(24))
