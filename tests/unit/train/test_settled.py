"""One model for a moment: what settling changes, what is put back, what a checkpoint gets."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stretto.comm.local import run_local
from stretto.strategy import AllReduceConfig, build_strategy
from stretto.train.settled import own_of_all_ranks, settled


class Buffers(nn.Module):
    """Holds one buffer under two names, one that is not saved, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("one", torch.zeros(2))
        self.register_buffer("same", self.one)
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)
        self.register_buffer("constant", torch.ones(3))


def on_ranks(values, work):
    """Run ``work(parts)`` on as many ranks as ``values``, which their buffers begin with."""

    def on_rank(channel):
        strategy = build_strategy(AllReduceConfig(), channel)
        model, _ = strategy.attach(Buffers(), lambda p: torch.optim.SGD(p, lr=0.1))
        for buffer in (model.one, model.unsaved):
            buffer.fill_(values[channel.rank])
        result = work(SimpleNamespace(model=model, strategy=strategy, channel=channel))
        strategy.close()
        return result

    return run_local(len(values), on_rank)


def stored(parts):
    with settled(parts) as own:
        return own_of_all_ranks(parts, own)


def test_inside_the_block_the_ranks_are_one_model():
    def work(parts):
        with settled(parts):
            return parts.model.one.tolist(), parts.model.unsaved.tolist()

    assert on_ranks([1.0, 2.0, 6.0], work) == [([3.0, 3.0], [3.0, 3.0])] * 3


def test_after_the_block_each_rank_has_its_own_buffers():
    def work(parts):
        with settled(parts):
            pass
        return parts.model.one.tolist(), parts.model.unsaved.tolist()

    assert on_ranks([1.0, 2.0], work) == [([1.0, 1.0], [1.0, 1.0]), ([2.0, 2.0], [2.0, 2.0])]


def test_a_failure_inside_the_block_does_not_keep_a_rank_from_its_own_buffers():
    def work(parts):
        with pytest.raises(OSError, match="full"), settled(parts):
            raise OSError("full")
        return parts.model.one.tolist()

    assert on_ranks([1.0, 2.0], work) == [[1.0, 1.0], [2.0, 2.0]]


def test_what_is_saved_of_ranks_is_what_differs_and_the_model_saves_by_all_its_names():
    on_rank_0, on_rank_1 = on_ranks([1.0, 2.0], stored)
    assert {name: t.tolist() for name, t in on_rank_0.items()} == {
        "rank-0/buffers/one": [1.0, 1.0],
        "rank-0/buffers/same": [1.0, 1.0],
        "rank-1/buffers/one": [2.0, 2.0],
        "rank-1/buffers/same": [2.0, 2.0],
    }
    assert on_rank_1 == {}


def test_a_sign_of_zero_that_settling_loses_is_saved():
    on_rank_0, _ = on_ranks([-0.0, 0.0], stored)
    assert bool(torch.signbit(on_rank_0["rank-0/buffers/one"]).all())


def test_what_is_no_number_on_all_ranks_alike_is_not_saved_by_rank():
    assert on_ranks([float("nan")] * 2, stored) == [{}, {}]
