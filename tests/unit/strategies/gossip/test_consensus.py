"""Sampled coordinates, and the distance that sums over them give."""

import math

import numpy as np
import pytest
import torch

from stretto.comm.in_process_transports import run_threads
from stretto.strategies.gossip import consensus
from stretto.strategies.gossip.consensus import (
    MIN_COORDINATES,
    ConsensusEstimator,
    choose_coordinates,
    distance,
)


def test_a_coordinate_is_looked_at_for_its_index_alone(monkeypatch):
    whole = choose_coordinates(0, 200_000, 0.01)
    assert len(whole) == pytest.approx(2_000, rel=0.1)
    assert (np.diff(whole) > 0).all()
    halves = [
        choose_coordinates(0, 100_000, 0.01),
        100_000 + choose_coordinates(100_000, 100_000, 0.01),
    ]
    assert np.array_equal(np.concatenate(halves), whole)
    monkeypatch.setattr(consensus, "HASH_BLOCK", 999)
    assert np.array_equal(choose_coordinates(0, 200_000, 0.01), whole)


@pytest.mark.parametrize("count", [0, 1, MIN_COORDINATES - 1, MIN_COORDINATES, 100])
def test_some_of_every_segment_are_looked_at(count):
    found = choose_coordinates(17, count, 1e-9)
    assert len(found) == len(set(found.tolist())) == min(MIN_COORDINATES, count)
    assert all(0 <= index < count for index in found)


def test_no_neighbours_are_preferred():
    gaps = np.diff(choose_coordinates(0, 1_000_000, 0.01))
    assert gaps.mean() == pytest.approx(100, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "as gaps of a fair draw"


def sums_over_ranks(x, weights):
    """Return the sums over ranks whose parameters are the rows of ``x``."""
    squares = float((weights * x**2).sum())
    return x.sum(0), weights, squares, float((x**2).sum()), len(x)


def test_all_coordinates_give_the_distance_itself():
    x = np.random.default_rng(0).normal(size=(3, 50))
    mean = x.mean(0)
    expected = math.sqrt(((x - mean) ** 2).sum() / 3 / (mean**2).sum())
    assert distance(*sums_over_ranks(x, np.ones(50))) == pytest.approx(expected, rel=1e-12)


def test_equal_models_are_not_apart_and_no_mean_is_infinitely_far():
    assert distance(*sums_over_ranks(np.ones((3, 4)), np.ones(4))) == pytest.approx(0, abs=1e-7)
    assert distance(*sums_over_ranks(np.zeros((3, 4)), np.ones(4))) == 0
    assert distance(*sums_over_ranks(np.array([[1.0], [-1.0]]), np.ones(1))) == math.inf
    assert math.isnan(distance(*sums_over_ranks(np.full((2, 1), math.nan), np.ones(1))))


def test_a_model_is_looked_at_however_it_lies_and_whatever_is_empty():
    image = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    segments = [[torch.ones(3), torch.empty(0), image], [torch.empty(0)]]

    def on_rank(transport):
        sent = []

        class Seeing:
            """The transport, which keeps a copy of every message."""

            size = transport.size

            def start_all_reduce(self, message):
                sent.append(message.clone())
                return transport.start_all_reduce(message)

        estimator = ConsensusEstimator(segments, 1.0, Seeing())
        assert estimator.read() is None
        estimator.sample_segment(0)
        estimator.sample_segment(1)
        estimator.start_measurement()
        (seen,) = sent
        return estimator.read(), estimator.read(), seen

    for consensus_distance, again, seen in run_threads(2, on_rank):
        assert consensus_distance == pytest.approx(0, abs=1e-7)
        assert again is None
        *samples, squares, norms = seen.tolist()
        assert samples == [1.0] * 3 + list(range(24))
        assert [squares, norms] == pytest.approx([3 + sum(i * i for i in range(24))] * 2)
