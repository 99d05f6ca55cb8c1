"""AD-PSGD is what its paper says in any order; nobody waits for a slow worker; nothing is lost."""

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
from stretto.comm.local import run_local
from stretto.errors import ConfigError
from stretto.optim.combining import average_pair_
from stretto.strategy import ADPSGDConfig, build_strategy
from stretto.topology import Act, random_events
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
"""By so much a worker begins above the one before, where it is to be seen that they meet."""


def flat(weights):
    return np.concatenate([w.ravel() for w in weights])


def published(events, workers):
    """Return every worker's weights after each event, as the paper has them."""
    all_ranks, read = Workers(workers), {}
    x, u, history = all_ranks.x, all_ranks.u, []
    for event in events:
        i = event.worker
        if event.act is Act.READ:
            read[i] = [w.copy() for w in x[i]]
        elif event.act is Act.AVERAGE:
            mean = [(a + b) / 2 for a, b in zip(x[i], x[event.peer], strict=True)]
            x[i], x[event.peer] = mean, [w.copy() for w in mean]
        else:
            batch = all_ranks.inputs[event.step, i], all_ranks.targets[event.step, i]
            for layer, g in enumerate(gradients(read[i], *batch)):
                u[i][layer] = MOMENTUM * u[i][layer] + g
                x[i][layer] = x[i][layer] - LR * u[i][layer]
        history.append(np.stack([flat(weights) for weights in x]))
    return history


class InOrder:
    """Lets real workers act in the order of a list, and looks at all known after each event."""

    def __init__(self, events):
        self._events, self._next = list(events), 0
        self._changed = threading.Condition()
        self.lives, self.history = {}, []

    def turn_of(self, rank):
        @contextmanager
        def turn(act):
            with self._changed:
                assert self._changed.wait_for(lambda: self._is_next(act, rank), 20), "stuck"
            yield
            with self._changed:
                if self.lives:
                    self.history.append(np.stack([self._seen(r) for r in sorted(self.lives)]))
                self._next += 1
                self._changed.notify_all()

        return turn

    def _is_next(self, act, rank):
        due = self._events[self._next] if self._next < len(self._events) else None
        return due is not None and (due.act, due.worker) == (act, rank)

    def _seen(self, rank):
        (values,) = self.lives[rank]._flats
        return values.numpy().copy()


def in_order(events, workers, steps):
    """Train real workers in an order; return all of their weights after each event."""
    order = InOrder(events)
    inputs, targets = batches(workers)
    ready = threading.Barrier(workers)

    def on_rank(channel):
        strategy = build_strategy(ADPSGDConfig(seed=SEED), channel)
        strategy.turn = order.turn_of(channel.rank)
        model, optimizer = strategy.attach(Chain(), sgd)
        strategy._live.take()
        order.lives[channel.rank] = strategy._live
        ready.wait()
        for step in range(steps):
            take_step(strategy, model, optimizer, step, inputs, targets)
        strategy.settle()
        settled = flat([p.detach().numpy() for p in model.parameters()])
        strategy.close()
        return settled

    return order.history, run_local(workers, on_rank)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)


def take_step(strategy, model, optimizer, step, inputs, targets):
    """Take a step as the loop does."""
    rank, workers = strategy._channel.rank, strategy._channel.size
    strategy.begin(step, 0, True, LR)
    x, y = (torch.from_numpy(a[step % len(a), rank]) for a in (inputs, targets))
    loss = (model(x) - y).square().sum() / 2
    (loss / (SAMPLES * workers)).backward()
    strategy.after_backward()
    optimizer.step()
    optimizer.zero_grad()
    strategy.after_update()


@pytest.mark.parametrize(
    ("workers", "paces"), [(WORKERS, None), (WORKERS, (9, 9, 1, 9)), (3, (1, 4, 4)), (5, None)]
)
def test_in_any_order_it_is_the_published_algorithm(workers, paces):
    events = list(random_events(workers, STEPS, SEED, paces))
    expected = published(events, workers)
    history, settled = in_order(events, workers, STEPS)
    assert len(history) == len(expected) == len(events)
    np.testing.assert_allclose(history, expected, rtol=0, atol=1e-12)
    for mean in settled:
        np.testing.assert_allclose(mean, expected[-1].mean(axis=0), rtol=0, atol=1e-12)


def test_virtual_workers_that_are_rows_of_a_tensor_go_the_same_way():
    events = list(random_events(WORKERS, STEPS, SEED))
    inputs, targets = batches(WORKERS)
    rows = torch.from_numpy(np.stack([flat(initial())] * WORKERS))
    momenta, read = torch.zeros_like(rows), rows.clone()
    sizes = [w.size for w in initial()]
    shapes = [w.shape for w in initial()]
    for event, wanted in zip(events, published(events, WORKERS), strict=True):
        i = event.worker
        if event.act is Act.READ:
            read[i] = rows[i]
        elif event.act is Act.AVERAGE:
            average_pair_(rows[i], rows[event.peer])
        else:
            parts = read[i].numpy()
            weights = [
                part.reshape(shape)
                for part, shape in zip(np.split(parts, sizes[:1]), shapes, strict=True)
            ]
            found = gradients(weights, inputs[event.step, i], targets[event.step, i])
            momenta[i] = MOMENTUM * momenta[i] + torch.from_numpy(flat(found))
            rows[i] -= LR * momenta[i]
        np.testing.assert_allclose(rows.numpy(), wanted, rtol=0, atol=1e-12)


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

    def on_rank(channel):
        strategy = build_strategy(ADPSGDConfig(), channel)
        model, optimizer = strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=LR))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(FAR * channel.rank)
        for step in range(steps):
            if step % 6 == 0:
                strategy.settle()  # or some may be done before others begin
            strategy.begin(step, 0, True, LR)
            strategy.after_backward()
            for parameter in model.parameters():
                parameter.grad.fill_(1 + channel.rank)
            optimizer.step()
            strategy.after_update()
        strategy.settle()
        mean, apart = flat([p.detach().numpy() for p in model.parameters()]), strategy.apart()
        strategy.close()
        return mean, apart

    for mean, apart in run_local(workers, on_rank):
        middle = (workers - 1) / 2
        wanted = flat(initial()) + FAR * middle - LR * steps * (1 + middle)
        np.testing.assert_allclose(mean, wanted, rtol=0, atol=1e-12)
        assert apart < 0.3, "more than a half, where nobody averages"


def test_one_worker_is_plain_sgd():
    events = list(random_events(1, STEPS, SEED))
    assert {event.act for event in events} == {Act.READ, Act.APPLY}
    history, _ = in_order(events, 1, STEPS)
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

    def on_rank(channel):
        strategy = build_strategy(ADPSGDConfig(), channel)
        model, optimizer = strategy.attach(Chain(), sgd)
        others = [rank for rank in range(WORKERS) if rank != slow]

        def forward_takes_long(*_):
            if made[slow] == 2:
                with changed:
                    done = changed.wait_for(lambda: all(made[rank] == 30 for rank in others), 20)
                assert done, f"others wait for a rank that has made 2 steps: {made}"

        if channel.rank == slow:
            model.first.register_forward_hook(forward_takes_long)
        for step in range(3 if channel.rank == slow else 30):
            take_step(strategy, model, optimizer, step, inputs, targets)
            with changed:
                made[channel.rank] += 1
                changed.notify_all()
        strategy.settle()
        strategy.close()

    run_local(WORKERS, on_rank)
    assert made[slow] == 3


def test_forward_and_backward_see_one_model_while_peers_average_with_it():
    inputs, targets = batches()

    def on_rank(channel):
        strategy = build_strategy(ADPSGDConfig(), channel)
        model, optimizer = strategy.attach(Chain(), sgd)
        meanwhile = []

        def wait_in_forward(*_):
            before = strategy._live._flats[0].clone()
            weights = [p.detach().clone() for p in model.parameters()]
            time.sleep(0.02)
            assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
            meanwhile.append(not torch.equal(before, strategy._live._flats[0]))

        model.second.register_forward_pre_hook(wait_in_forward)
        for step in range(20):
            take_step(strategy, model, optimizer, step, inputs, targets)
        strategy.settle()
        strategy.close()
        return any(meanwhile)

    assert any(run_local(WORKERS, on_rank))


def test_what_ranks_settle_on_is_the_mean_and_each_goes_on_with_its_own():
    inputs, targets = batches()

    def on_rank(channel):
        strategy = build_strategy(ADPSGDConfig(), channel)
        model, optimizer = strategy.attach(Chain(), sgd)
        for step in range(5):
            take_step(strategy, model, optimizer, step, inputs, targets)

        def weights():
            return torch.cat([p.detach().flatten() for p in model.parameters()])

        strategy.settle()
        mean, live = weights(), strategy._live._flats[0].clone()
        strategy.settle()
        again = weights()
        strategy.unsettle()
        own = weights()
        strategy.settle()
        with torch.no_grad():
            model.first.weight.fill_(3.0)  # somebody loads other weights
            model.second.weight.fill_(3.0)
        strategy.begin(5, 0, True, LR)
        loaded = strategy._live._flats[0].clone()
        strategy.settle()
        strategy.close()
        return mean, live, again, own, loaded

    found = run_local(WORKERS, on_rank)
    wanted = torch.stack([live for _, live, *_ in found]).mean(dim=0)
    for mean, live, again, own, loaded in found:
        torch.testing.assert_close(mean, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(again, wanted, rtol=0, atol=1e-12)
        assert torch.equal(own, live)
        assert (loaded == 3).all()


def fail():
    raise ValueError("odd")


def test_a_rank_that_fails_is_heard_of_by_all_who_wait_for_it():
    inputs, targets = batches()
    lost = []

    def on_rank(channel):
        strategy = build_strategy(ADPSGDConfig(), channel)
        fail_at = 3 if channel.rank == 1 else None
        try:
            # A slow rank may still be about to attach when it hears of it.
            model, optimizer = strategy.attach(Chain(), sgd)
            model.register_forward_pre_hook(
                lambda *_: fail() if strategy._step == fail_at else None
            )
            for step in range(100):
                take_step(strategy, model, optimizer, step, inputs, targets)
            strategy.settle()
        except Exception:
            lost.append(channel.rank)
            raise
        finally:
            strategy.close()

    with pytest.raises(ValueError, match="odd"):
        run_local(WORKERS, on_rank)
    assert sorted(lost) == list(range(WORKERS))


def stepped(optimizer, loss):
    """Step as most people do."""
    loss()
    optimizer.step()


def stepped_afresh(optimizer, loss):
    """Step by a closure; what it remembers of curvature is of a model that peers have moved."""
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

    def on_rank(channel):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(channel.rank)).double()
        model, optimizer = stretto.distribute(
            copy.deepcopy(start), make, ADPSGDConfig(), channel=channel
        )

        def loss():
            optimizer.zero_grad()
            error = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
            error.backward()
            return error

        for number in range(60):
            step(optimizer, loss)
            if number % 20 == 19:
                stretto.settle(model)
        return float((model.weight.detach() - 1).abs().max())

    assert max(run_local(3, on_rank)) < 0.01


def test_a_gpu_is_refused_with_what_to_do():
    def on_rank(channel):
        strategy = build_strategy(ADPSGDConfig(), channel)
        try:
            strategy.attach(nn.Linear(2, 2, device="meta"), sgd)
        finally:
            strategy.close()

    with pytest.raises(ConfigError, match=r"weight is on meta.*'crossover'"):
        run_local(1, on_rank)


def test_orders_of_the_same_seed_are_the_same():
    one, other = (list(islice(random_events(4, 9, 3), 60)) for _ in range(2))
    assert one == other
    assert one != list(islice(random_events(4, 9, 4), 60))
