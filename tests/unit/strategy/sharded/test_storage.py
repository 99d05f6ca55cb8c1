"""A rank's chunks lie inside whole parameters, or apart: nothing that is written is lost."""

import pytest
import torch

from tests.unit.strategy.sharded.test_refusals import mlp, on_ranks, train


@pytest.mark.parametrize("plan", ["ddp", "zero1", "dear", "zero2", "zero3"])
def test_what_is_written_between_settle_and_the_next_step_is_trained_on(plan):
    def work(strategy, model):
        train(strategy, model)
        strategy.settle()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
        train(strategy, model, 1)
        strategy.settle()
        return [parameter.clone() for parameter in model.parameters()]

    alone = mlp()
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.fill_(0.25)
    (2 * alone(torch.ones(2, 4)).sum()).backward()  # what two ranks add up to
    expected = [p.detach() - 0.1 * p.grad for p in alone.parameters()]
    for rank in on_ranks(work, plan=plan):
        for mine, theirs in zip(rank, expected, strict=True):
            assert torch.allclose(mine, theirs)


def test_chunks_are_kept_once_while_parameters_are_whole():
    def work(strategy, model):
        for step in range(2):
            train(strategy, model, step)
        strategy.begin(2, 0, True, 0.1)
        loss = model(torch.ones(2, 4)).sum()
        held = dict(strategy.ledger.held())
        loss.backward()
        strategy.after_backward()
        strategy.after_update()
        return held

    for held in on_ranks(work, plan="zero2"):
        assert set(held) == {"gathered parameters"}
