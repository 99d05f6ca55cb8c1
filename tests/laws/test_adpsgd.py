"""AD-PSGD equals its paper in every order; a slow worker delays nobody; no update is lost."""

import copy
import threading
import time
from contextlib import contextmanager
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import stretto
from stretto.comm.in_process_transports import run_threads
from stretto.errors import ConfigError
from stretto.optim.rules import average_pair_
from stretto.strategies import ADPSGDConfig, build_strategy
from stretto.topology import OperationKind, random_operation_order
from tests.laws.test_gossip import (
    LR,
    MOMENTUM,
    SAMPLES,
    STEPS,
    WORKERS,
    Chain,
    Workers,
    assert_same,
    batches,
    gradients,
    initial,
)

SEED = 5
FAR = 10
"""Difference between the initial weights of consecutive workers, to show that they converge."""


def flat(weights):
    return np.concatenate([w.ravel() for w in weights])


def published(operations, workers):
    """Return every worker's weights after each operation, by the paper's algorithm."""
    all_ranks, read = Workers(workers), {}
    x, u, history = all_ranks.x, all_ranks.u, []
    for operation in operations:
        i = operation.worker
        if operation.kind is OperationKind.READ:
            read[i] = [w.copy() for w in x[i]]
        elif operation.kind is OperationKind.AVERAGE:
            mean = [(a + b) / 2 for a, b in zip(x[i], x[operation.peer], strict=True)]
            x[i], x[operation.peer] = mean, [w.copy() for w in mean]
        else:
            batch = all_ranks.inputs[operation.step, i], all_ranks.targets[operation.step, i]
            for layer, g in enumerate(gradients(read[i], *batch)):
                u[i][layer] = MOMENTUM * u[i][layer] + g
                x[i][layer] = x[i][layer] - LR * u[i][layer]
        history.append(np.stack([flat(weights) for weights in x]))
    return history


class InOrder:
    """Runs the operations of real workers in a given order; records weights after each one."""

    def __init__(self, operations):
        self._operations, self._next = list(operations), 0
        self._changed = threading.Condition()
        self.lives, self.history = {}, []

    def turn_of(self, rank):
        @contextmanager
        def operation_gate(kind):
            with self._changed:
                assert self._changed.wait_for(lambda: self._is_next(kind, rank), 20), "stuck"
            yield
            with self._changed:
                if self.lives:
                    self.history.append(np.stack([self._seen(r) for r in sorted(self.lives)]))
                self._next += 1
                self._changed.notify_all()

        return operation_gate

    def _is_next(self, kind, rank):
        due = self._operations[self._next] if self._next < len(self._operations) else None
        return due is not None and (due.kind, due.worker) == (kind, rank)

    def _seen(self, rank):
        return live_values(self.lives[rank]).numpy()


def live_values(live):
    """Return a copy of a live model, whose parameters are of one type."""
    (values,) = buffers = live.new_buffers()
    live.copy_into(buffers)
    return values


def in_order(operations, workers, steps):
    """Train real workers in a given order; return all weights after each operation."""
    order = InOrder(operations)
    inputs, targets = batches(workers)
    ready = threading.Barrier(workers)

    def on_rank(transport):
        strategy = build_strategy(ADPSGDConfig(seed=SEED), transport)
        strategy.operation_gate = order.turn_of(transport.rank)
        model, optimizer = strategy.attach(Chain(), sgd)
        live = strategy.inspect()
        live.copy_from_parameters()
        order.lives[transport.rank] = live
        ready.wait()
        for step in range(steps):
            take_step(transport, strategy, model, optimizer, step, inputs, targets)
        strategy.consolidate()
        consolidated = flat([p.detach().numpy() for p in model.parameters()])
        strategy.close()
        return consolidated

    return order.history, run_threads(workers, on_rank)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)


def take_step(transport, strategy, model, optimizer, step, inputs, targets):
    """Take a step as the loop does."""
    strategy.begin(step, 0, True, LR)
    x, y = (torch.from_numpy(a[step % len(a), transport.rank]) for a in (inputs, targets))
    loss = (model(x) - y).square().sum() / 2
    (loss / (SAMPLES * transport.size)).backward()
    strategy.after_backward()
    optimizer.step()
    optimizer.zero_grad()
    strategy.after_update()


@pytest.mark.parametrize(
    ("workers", "relative_speeds"),
    [(WORKERS, None), (WORKERS, (9, 9, 1, 9)), (3, (1, 4, 4)), (5, None)],
)
def test_real_workers_in_a_given_order_are_the_published_algorithm(workers, relative_speeds):
    operations = list(random_operation_order(workers, STEPS, SEED, relative_speeds))
    expected = published(operations, workers)
    history, consolidated = in_order(operations, workers, STEPS)
    assert len(history) == len(expected) == len(operations)
    np.testing.assert_allclose(history, expected, rtol=0, atol=1e-12)
    for mean in consolidated:
        np.testing.assert_allclose(mean, expected[-1].mean(axis=0), rtol=0, atol=1e-12)


def test_virtual_workers_that_are_rows_of_a_tensor_go_the_same_way():
    operations = list(random_operation_order(WORKERS, STEPS, SEED))
    inputs, targets = batches(WORKERS)
    rows = torch.from_numpy(np.stack([flat(initial())] * WORKERS))
    momenta, read = torch.zeros_like(rows), rows.clone()
    sizes = [w.size for w in initial()]
    shapes = [w.shape for w in initial()]
    for operation, expected in zip(operations, published(operations, WORKERS), strict=True):
        i = operation.worker
        if operation.kind is OperationKind.READ:
            read[i] = rows[i]
        elif operation.kind is OperationKind.AVERAGE:
            average_pair_(rows[i], rows[operation.peer])
        else:
            parts = read[i].numpy()
            weights = [
                part.reshape(shape)
                for part, shape in zip(np.split(parts, sizes[:1]), shapes, strict=True)
            ]
            found = gradients(weights, inputs[operation.step, i], targets[operation.step, i])
            momenta[i] = MOMENTUM * momenta[i] + torch.from_numpy(flat(found))
            rows[i] -= LR * momenta[i]
        np.testing.assert_allclose(rows.numpy(), expected, rtol=0, atol=1e-12)


@given(st.lists(st.tuples(*[st.floats(-1e6, 1e6)] * 2), min_size=1, max_size=8))
def test_a_pair_comes_to_its_mean_and_what_one_gains_the_other_loses(pairs):
    one, other = torch.tensor(pairs, dtype=torch.float64).T.clone()
    mean = (one + other) / 2
    average_pair_(one, other)
    torch.testing.assert_close(one, mean, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(other, mean, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_updates_alone_move_the_mean_and_averages_bring_workers_together(workers):
    steps = 60

    def on_rank(transport):
        strategy = build_strategy(ADPSGDConfig(), transport)
        model, optimizer = strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=LR))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(FAR * transport.rank)
        for step in range(steps):
            if step % 6 == 0:
                strategy.consolidate()  # or some may be done before others begin
            strategy.begin(step, 0, True, LR)
            strategy.after_backward()
            for parameter in model.parameters():
                parameter.grad.fill_(1 + transport.rank)
            optimizer.step()
            strategy.after_update()
        strategy.consolidate()
        mean, consensus_distance = (
            flat([p.detach().numpy() for p in model.parameters()]),
            strategy.consensus_distance(),
        )
        strategy.close()
        return mean, consensus_distance

    for mean, consensus_distance in run_threads(workers, on_rank):
        middle = (workers - 1) / 2
        expected = flat(initial()) + FAR * middle - LR * steps * (1 + middle)
        np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-12)
        assert consensus_distance < 0.3, "more than a half, where nobody averages"


def test_one_worker_is_plain_sgd():
    operations = list(random_operation_order(1, STEPS, SEED))
    assert {operation.kind for operation in operations} == {OperationKind.READ, OperationKind.APPLY}
    history, _ = in_order(operations, 1, STEPS)
    workers = Workers(1)
    expected = []
    for step in range(STEPS):
        workers.adapt(step)
        expected.append(workers.copy())
    cut = len(flat(initial()[:1]))
    shaped = [
        [part.reshape(w.shape) for part, w in zip(np.split(row[0], [cut]), initial(), strict=True)]
        for row in history[1::2]
    ]
    assert_same([shaped], expected)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_worker_holds_nobody_up(slow):
    inputs, targets = batches()
    made, changed = [0] * WORKERS, threading.Condition()

    def on_rank(transport):
        strategy = build_strategy(ADPSGDConfig(), transport)
        model, optimizer = strategy.attach(Chain(), sgd)
        others = [rank for rank in range(WORKERS) if rank != slow]

        def forward_takes_long(*_):
            if made[slow] == 2:
                with changed:
                    done = changed.wait_for(lambda: all(made[rank] == 30 for rank in others), 20)
                assert done, f"others wait for a rank that has made 2 steps: {made}"

        if transport.rank == slow:
            model.first.register_forward_hook(forward_takes_long)
        for step in range(3 if transport.rank == slow else 30):
            take_step(transport, strategy, model, optimizer, step, inputs, targets)
            with changed:
                made[transport.rank] += 1
                changed.notify_all()
        strategy.consolidate()
        strategy.close()

    run_threads(WORKERS, on_rank)
    assert made[slow] == 3


def test_forward_and_backward_see_one_model_while_peers_average_with_it():
    inputs, targets = batches()

    def on_rank(transport):
        strategy = build_strategy(ADPSGDConfig(), transport)
        model, optimizer = strategy.attach(Chain(), sgd)
        meanwhile = []

        def wait_in_forward(*_):
            before = live_values(strategy.inspect())
            weights = [p.detach().clone() for p in model.parameters()]
            time.sleep(0.02)
            assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
            meanwhile.append(not torch.equal(before, live_values(strategy.inspect())))

        model.second.register_forward_pre_hook(wait_in_forward)
        for step in range(20):
            take_step(transport, strategy, model, optimizer, step, inputs, targets)
        strategy.consolidate()
        strategy.close()
        return any(meanwhile)

    assert any(run_threads(WORKERS, on_rank))


def test_consolidate_gives_the_mean_and_each_rank_gets_its_own_back():
    inputs, targets = batches()

    def on_rank(transport):
        strategy = build_strategy(ADPSGDConfig(), transport)
        model, optimizer = strategy.attach(Chain(), sgd)
        for step in range(5):
            take_step(transport, strategy, model, optimizer, step, inputs, targets)

        def weights():
            return torch.cat([p.detach().flatten() for p in model.parameters()])

        strategy.consolidate()
        mean, live = weights(), live_values(strategy.inspect())
        strategy.consolidate()
        again = weights()
        strategy.restore_local()
        own = weights()
        strategy.consolidate()
        with torch.no_grad():
            model.first.weight.fill_(3.0)  # other weights are loaded
            model.second.weight.fill_(3.0)
        strategy.begin(5, 0, True, LR)
        loaded = live_values(strategy.inspect())
        strategy.consolidate()
        strategy.close()
        return mean, live, again, own, loaded

    found = run_threads(WORKERS, on_rank)
    expected = torch.stack([live for _, live, *_ in found]).mean(dim=0)
    for mean, live, again, own, loaded in found:
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(again, expected, rtol=0, atol=1e-12)
        assert torch.equal(own, live)
        assert (loaded == 3).all()


def fail():
    raise ValueError("odd")


def test_a_failed_rank_is_noticed_by_all_who_wait_for_it():
    inputs, targets = batches()
    lost = []

    def on_rank(transport):
        strategy = build_strategy(ADPSGDConfig(), transport)
        fail_at = 3 if transport.rank == 1 else None
        try:
            # A slow rank may notice the failure before it has attached.
            model, optimizer = strategy.attach(Chain(), sgd)
            model.register_forward_pre_hook(
                lambda *_: fail() if strategy.next_update().step == fail_at else None
            )
            for step in range(100):
                take_step(transport, strategy, model, optimizer, step, inputs, targets)
            strategy.consolidate()
        except Exception:
            lost.append(transport.rank)
            raise
        finally:
            strategy.close()

    with pytest.raises(ValueError, match="odd"):
        run_threads(WORKERS, on_rank)
    assert sorted(lost) == list(range(WORKERS))


def stepped(optimizer, loss):
    """Step as most people do."""
    loss()
    optimizer.step()


def stepped_afresh(optimizer, loss):
    """Step with a closure and no state: the curvature is of a model that peers have changed."""
    optimizer.state.clear()
    optimizer.step(loss)


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), stepped),
        (lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=2), stepped_afresh),
    ],
    ids=["plain", "closure"],
)
def test_in_a_loop_of_ones_own_with_looks_at_the_mean(make, step):
    start = nn.Linear(3, 1).double()

    def on_rank(transport):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(transport.rank)).double()
        model, optimizer = stretto.distribute(
            copy.deepcopy(start), make, ADPSGDConfig(), transport=transport
        )

        def loss():
            optimizer.zero_grad()
            error = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
            error.backward()
            return error

        for number in range(60):
            step(optimizer, loss)
            if number % 20 == 19:
                stretto.consolidate(model)
        return float((model.weight.detach() - 1).abs().max())

    assert max(run_threads(3, on_rank)) < 0.01


def test_a_gpu_is_refused_with_what_to_do():
    def on_rank(transport):
        strategy = build_strategy(ADPSGDConfig(), transport)
        try:
            strategy.attach(nn.Linear(2, 2, device="meta"), sgd)
        finally:
            strategy.close()

    with pytest.raises(ConfigError, match=r"weight is on meta.*'crossover'"):
        run_threads(1, on_rank)


def test_orders_of_the_same_seed_are_the_same():
    one, other = (list(islice(random_operation_order(4, 9, 3), 60)) for _ in range(2))
    assert one == other
    assert one != list(islice(random_operation_order(4, 9, 4), 60))
