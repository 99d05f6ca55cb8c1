"""A rank's chunks lie inside whole parameters or in the master tensor; no write is lost."""

import pytest
import torch

from tests.unit.strategies.sharded.test_refusals import mlp, on_ranks, train


@pytest.mark.parametrize("plan", ["ddp", "zero1", "dear", "zero2", "zero3"])
def test_weights_written_after_consolidate_are_trained_in_the_next_step(plan):
    def work(strategy, model):
        train(strategy, model)
        strategy.consolidate()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
        train(strategy, model, 1)
        strategy.consolidate()
        return [parameter.clone() for parameter in model.parameters()]

    reference = mlp()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.fill_(0.25)
    (2 * reference(torch.ones(2, 4)).sum()).backward()  # what two ranks add up to
    expected = [p.detach() - 0.1 * p.grad for p in reference.parameters()]
    for rank in on_ranks(work, plan=plan):
        for mine, theirs in zip(rank, expected, strict=True):
            assert torch.allclose(mine, theirs)


def test_chunks_are_kept_once_while_parameters_are_whole():
    def work(strategy, model):
        for step in range(2):
            train(strategy, model, step)
        strategy.begin(2, 0, True, 0.1)
        loss = model(torch.ones(2, 4)).sum()
        bytes_by_kind = dict(strategy.memory_tracker.bytes_by_kind())
        loss.backward()
        strategy.after_backward()
        strategy.after_update()
        return bytes_by_kind

    for bytes_by_kind in on_ranks(work, plan="zero2"):
        assert set(bytes_by_kind) == {"gathered parameters"}
