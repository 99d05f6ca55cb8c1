"""Consolidation: what it changes, what is restored, and what a checkpoint stores."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stretto.comm.in_process_transports import run_threads
from stretto.strategies import AllReduceConfig, build_strategy
from stretto.train.state import consolidated_model, gather_local_buffers


class Buffers(nn.Module):
    """Has one buffer under two names, one that is not saved, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("one", torch.zeros(2))
        self.register_buffer("same", self.one)
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)
        self.register_buffer("constant", torch.ones(3))


def on_ranks(values, work):
    """Run ``work(parts)`` on one rank per value; its buffers are initialised with that value."""

    def on_rank(transport):
        strategy = build_strategy(AllReduceConfig(), transport)
        model, _ = strategy.attach(Buffers(), lambda p: torch.optim.SGD(p, lr=0.1))
        for buffer in (model.one, model.unsaved):
            buffer.fill_(values[transport.rank])
        result = work(SimpleNamespace(model=model, strategy=strategy, transport=transport))
        strategy.close()
        return result

    return run_threads(len(values), on_rank)


def stored(parts):
    with consolidated_model(parts) as local_buffers:
        return gather_local_buffers(parts, local_buffers)


def test_inside_the_block_the_ranks_are_one_model():
    def work(parts):
        with consolidated_model(parts):
            return parts.model.one.tolist(), parts.model.unsaved.tolist()

    assert on_ranks([1.0, 2.0, 6.0], work) == [([3.0, 3.0], [3.0, 3.0])] * 3


def test_after_the_block_each_rank_has_its_own_buffers():
    def work(parts):
        with consolidated_model(parts):
            pass
        return parts.model.one.tolist(), parts.model.unsaved.tolist()

    assert on_ranks([1.0, 2.0], work) == [([1.0, 1.0], [1.0, 1.0]), ([2.0, 2.0], [2.0, 2.0])]


def test_buffers_are_restored_after_a_failure_inside_the_block():
    def work(parts):
        with pytest.raises(OSError, match="full"), consolidated_model(parts):
            raise OSError("full")
        return parts.model.one.tolist()

    assert on_ranks([1.0, 2.0], work) == [[1.0, 1.0], [2.0, 2.0]]


def test_per_rank_buffers_are_saved_if_they_differ_under_all_names_of_the_model():
    on_rank_0, on_rank_1 = on_ranks([1.0, 2.0], stored)
    assert {name: t.tolist() for name, t in on_rank_0.items()} == {
        "rank-0/buffers/one": [1.0, 1.0],
        "rank-0/buffers/same": [1.0, 1.0],
        "rank-1/buffers/one": [2.0, 2.0],
        "rank-1/buffers/same": [2.0, 2.0],
    }
    assert on_rank_1 == {}


def test_a_sign_of_zero_that_consolidation_loses_is_saved():
    on_rank_0, _ = on_ranks([-0.0, 0.0], stored)
    assert bool(torch.signbit(on_rank_0["rank-0/buffers/one"]).all())


def test_a_nan_that_is_equal_on_all_ranks_is_not_saved_per_rank():
    assert on_ranks([float("nan")] * 2, stored) == [{}, {}]
