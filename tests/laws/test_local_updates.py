"""Local updates equal their papers: histories against plain NumPy, worker by worker.

The formulas are written once more here from the papers, worker by worker and layer by layer.
"""

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn

import stretto
from stretto.comm.in_process_transports import run_threads
from stretto.errors import CheckpointError
from stretto.optim.rules import outer_average_, outer_nesterov_, outer_noloco_, outer_slowmo_
from stretto.strategies import (
    AllReduceConfig,
    DiLoCoConfig,
    LocalSGDConfig,
    NoLoCoConfig,
    PostLocalConfig,
    SlowMoConfig,
    build_strategy,
)
from stretto.strategies.local_state import optimizer_tensors
from stretto.topology.analysis import mixing_matrix
from tests.laws import test_no_trace as no_trace
from tests.laws.test_gossip import (
    LR,
    MOMENTUM,
    SAMPLES,
    STEPS,
    WORKERS,
    Chain,
    assert_same,
    batches,
    gradients,
    initial,
)

LAYERS = range(2)
SIZES = [WORKERS, 3, 1]


def rate(step):
    """Return a rate that falls: whoever divides by another step's is found out."""
    return LR / (1 + step / 10)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=LR)


class Rank:
    """One rank that a test steps as the training loop does."""

    def __init__(self, config, transport, make=sgd):
        self.transport = transport
        self.strategy = build_strategy(config, transport)
        self.model, self.optimizer = self.strategy.attach(Chain(), make)
        self.inputs, self.targets = batches(transport.size)

    def batch(self, step):
        arrays = (self.inputs, self.targets)
        return [torch.from_numpy(array[step, self.transport.rank]) for array in arrays]

    def step(self, step, *, counts=True):
        for group in self.optimizer.param_groups:
            group["lr"] = rate(step)
        self.strategy.begin(step, 0, True, rate(step))
        x, y = self.batch(step)
        loss = (self.model(x) - y).square().sum() / 2
        (loss / (SAMPLES * self.transport.size)).backward()
        step_gradients = self.strategy.after_backward(update=counts)
        if counts and not step_gradients.is_applied:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if counts:
            self.strategy.after_update()

    def weights(self):
        return [p.detach().numpy().copy() for p in self.model.parameters()]


def trained(config, workers=WORKERS, *, make=sgd, left_out=()):
    """Return each worker's weights after every step."""

    def on_rank(transport):
        rank, history = Rank(config, transport, make), []
        for step in range(STEPS):
            rank.step(step, counts=step not in left_out)
            history.append(rank.weights())
        rank.strategy.close()
        return history

    return run_threads(workers, on_rank)


class Team:
    """Workers in NumPy: weights and optimizer state of each, by layer."""

    def __init__(self, workers, momentum=MOMENTUM):
        self.x = [initial() for _ in range(workers)]
        self.momentum = momentum
        self.inputs, self.targets = batches(workers)
        self.forget()
        self.seconds = [[np.zeros_like(w) for w in initial()] for _ in self.x]
        self.history = []

    def forget(self):
        self.u = [[np.zeros_like(w) for w in initial()] for _ in self.x]

    def found(self, step):
        for rank, weights in enumerate(self.x):
            yield rank, gradients(weights, self.inputs[step, rank], self.targets[step, rank])

    def step(self, step):
        for rank, found in list(self.found(step)):
            for k in LAYERS:
                self.u[rank][k] = self.momentum * self.u[rank][k] + found[k]
                self.x[rank][k] = self.x[rank][k] - rate(step) * self.u[rank][k]

    def adam_step(self, step):
        for rank, found in list(self.found(step)):
            for k in LAYERS:
                self.u[rank][k] = 0.9 * self.u[rank][k] + 0.1 * found[k]
                self.seconds[rank][k] = 0.999 * self.seconds[rank][k] + 0.001 * found[k] ** 2
                first = self.u[rank][k] / (1 - 0.9 ** (step + 1))
                second = self.seconds[rank][k] / (1 - 0.999 ** (step + 1))
                self.x[rank][k] = self.x[rank][k] - rate(step) * first / (np.sqrt(second) + 1e-8)

    def mean(self):
        return [np.mean([x[k] for x in self.x], axis=0) for k in LAYERS]

    def all_at(self, weights):
        self.x = [[w.copy() for w in weights] for _ in self.x]

    def note(self):
        self.history.append([[w.copy() for w in weights] for weights in self.x])


def zeros():
    return [np.zeros_like(w) for w in initial()]


def local_sgd(workers, due, momentum=MOMENTUM):
    """Return the history of workers that average after the steps that are due."""
    team = Team(workers, momentum)
    for step in range(STEPS):
        team.step(step)
        if due(step):
            team.all_at(team.mean())
        team.note()
    return team.history


@pytest.mark.parametrize("workers", SIZES)
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_local_sgd_averages_parameters_every_so_many_steps(workers, algorithm):
    config = LocalSGDConfig(every=3, algorithm=algorithm)
    assert_same(trained(config, workers), local_sgd(workers, lambda step: (step + 1) % 3 == 0))


@pytest.mark.parametrize("workers", SIZES)
def test_post_local_averages_after_every_step_until_it_does_not(workers):
    def due(step):
        return step < 6 or (step + 1) % 4 == 0

    config = PostLocalConfig(every=4, from_step=6)
    assert_same(trained(config, workers), local_sgd(workers, due))


@pytest.mark.parametrize("workers", SIZES)
@pytest.mark.parametrize("make", [sgd, adam])
def test_slowmo_has_a_momentum_of_rounds_and_empties_that_of_sgd_alone(workers, make):
    alpha, beta, team = 0.8, 0.6, Team(workers)
    start, u = initial(), zeros()
    for step in range(STEPS):
        if make is adam:
            team.adam_step(step)
        else:
            team.step(step)
        if (step + 1) % 4 == 0:
            mean = team.mean()
            u = [beta * u[k] + (start[k] - mean[k]) / rate(step) for k in LAYERS]
            start = [start[k] - alpha * rate(step) * u[k] for k in LAYERS]
            team.all_at(start)
            if make is sgd:
                team.forget()
        team.note()
    config = SlowMoConfig(every=4, alpha=alpha, beta=beta)
    assert_same(trained(config, workers, make=make), team.history)


def diloco(workers, lr=0.7, momentum=0.9):
    """Return the history of DiLoCo as its first paper has it: every 4 steps, all at once."""
    team, start, m = Team(workers), initial(), zeros()
    for step in range(STEPS):
        team.step(step)
        if (step + 1) % 4 == 0:
            delta = [np.mean([start[k] - x[k] for x in team.x], axis=0) for k in LAYERS]
            m = [momentum * m[k] + delta[k] for k in LAYERS]
            start = [start[k] - lr * (delta[k] + momentum * m[k]) for k in LAYERS]
            team.all_at(start)
        team.note()
    return team.history


@pytest.mark.parametrize("workers", SIZES)
def test_diloco_steps_by_nesterovs_rule_along_how_far_all_have_moved(workers):
    assert_same(trained(DiLoCoConfig(every=4), workers), diloco(workers))


def streaming(workers, fragments, delay, mix, left_out=()):
    """Return the history of DiLoCo whose layers take turns, and arrive ``delay`` steps late."""
    team, start, m, under_way = Team(workers), initial(), zeros(), {}
    for step in range(STEPS):
        if step not in left_out:
            team.step(step)
            for k in LAYERS:
                if k in under_way and step - under_way[k][0] >= delay:
                    arrive(team, k, under_way.pop(k)[1], start, m, mix)
                turn = k if fragments == 2 else 0
                if (step + 1) % 4 == (turn + 1) * 4 // fragments % 4:
                    under_way[k] = step, np.mean([start[k] - x[k] for x in team.x], axis=0)
                    if not delay:
                        arrive(team, k, under_way.pop(k)[1], start, m, mix)
        team.note()
    return team.history


def arrive(team, k, delta, start, m, mix):
    m[k] = 0.9 * m[k] + delta
    start[k] = start[k] - 0.7 * (delta + 0.9 * m[k])
    for x in team.x:
        x[k] = (1 - mix) * x[k] + mix * start[k]


@pytest.mark.parametrize("workers", SIZES)
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
@pytest.mark.parametrize(
    ("fragments", "delay", "mix"),
    [(2, 0, 1.0), (2, 1, 0.5), (1, 3, 0.25), (2, 1, 1.0), (1, 0, 0.5)],
)
def test_streaming_fragments_take_turns_and_count_when_they_arrive(
    workers, algorithm, fragments, delay, mix
):
    config = DiLoCoConfig(every=4, fragments=fragments, delay=delay, mix=mix, algorithm=algorithm)
    assert_same(trained(config, workers), streaming(workers, fragments, delay, mix))


def test_one_fragment_at_once_and_all_the_way_is_plain_diloco():
    found = np.array([[w.sum() for x in step for w in x] for step in streaming(4, 1, 0, 1.0)])
    plain = np.array([[w.sum() for x in step for w in x] for step in diloco(4)])
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-12)
    config = DiLoCoConfig(every=4, fragments=1, delay=0, mix=1.0, algorithm="ring")
    assert_same(trained(config), diloco(4))


@pytest.mark.parametrize("left_out", [{2, 7}, {3, 4, 5, 6}, {1, 2, 3, 4, 5, 6, 7, 8}])
def test_steps_left_out_part_no_ranks_and_a_late_fragment_counts_when_it_can(left_out):
    config = DiLoCoConfig(every=4, fragments=2, delay=1, mix=0.5, algorithm="ring")
    assert_same(trained(config, left_out=left_out), streaming(4, 2, 1, 0.5, left_out))


@pytest.mark.parametrize("workers", [WORKERS, 5, 1])
def test_noloco_follows_the_mean_of_a_pair_that_is_drawn_anew(workers):
    lr, mu, config = 0.7, 0.5, NoLoCoConfig(every=3, seed=2)
    team = Team(workers)
    old, m = [initial() for _ in range(workers)], [zeros() for _ in range(workers)]
    pairings = set()
    for step in range(STEPS):
        team.step(step)
        if (step + 1) % 3 == 0:
            pairs = mixing_matrix(config.build_topology(), workers, step // 3) > 0
            pairings.add(pairs.tobytes())
            news = []
            for i in range(workers):
                pair = [j for j in range(workers) if pairs[i, j]]
                assert len(pair) == 2 or workers % 2
                D = [np.mean([team.x[j][k] - old[j][k] for j in pair], axis=0) for k in LAYERS]
                M = [np.mean([old[j][k] for j in pair], axis=0) for k in LAYERS]
                m[i] = [mu * m[i][k] + lr * D[k] + lr * (M[k] - old[i][k]) for k in LAYERS]
                news.append([old[i][k] + m[i][k] for k in LAYERS])
            old = news
            team.x = [[w.copy() for w in new] for new in news]
        team.note()
    assert_same(trained(config, workers), team.history)
    assert workers == 1 or len(pairings) > 1


def plain(parameters):
    return torch.optim.SGD(parameters, lr=LR)


def by_step(history):
    """Return histories as `assert_same` expects them: step, then rank."""
    return list(zip(*history, strict=True))


@pytest.mark.parametrize("make", [plain, sgd])
def test_rounds_after_every_step_are_synchronous_sgd(make):
    # Momentum is linear: the mean of all ranks' is that of the mean gradient.
    synchronous = by_step(trained(AllReduceConfig(), make=make))
    assert_same(trained(LocalSGDConfig(every=1), make=make), synchronous)
    later = PostLocalConfig(every=7, from_step=STEPS)
    assert_same(trained(later, make=make), synchronous)


@pytest.mark.parametrize("kind", [LocalSGDConfig, PostLocalConfig])
def test_one_worker_alone_is_plain_sgd(kind):
    assert_same(trained(kind(every=3), 1), local_sgd(1, lambda _step: False))


def test_slowmo_without_a_slow_momentum_is_local_sgd_that_empties_its_own():
    slow = trained(SlowMoConfig(every=4, alpha=1.0, beta=0.0))
    assert_same(slow, by_step(trained(LocalSGDConfig(every=4, reset_momentum=True))))
    kept = trained(LocalSGDConfig(every=4))
    assert np.abs(kept[0][-1][0] - slow[0][-1][0]).max() > 1e-3


def test_a_rank_without_samples_steps_by_zero_and_the_mean_is_synchronous_still():
    def on_rank(transport, config):
        rank = Rank(config, transport)
        for step in range(6):
            rank.strategy.begin(step, 0, True, LR)
            if transport.rank != step % 3:
                x, y = (
                    torch.from_numpy(a[step, transport.rank]) for a in (rank.inputs, rank.targets)
                )
                ((rank.model(x) - y).square().sum() / (4 * SAMPLES)).backward()
            if not rank.strategy.after_backward().is_applied:
                rank.optimizer.step()
            rank.optimizer.zero_grad()
            rank.strategy.after_update()
        rank.strategy.close()
        return [rank.weights()]

    local = run_threads(3, lambda c: on_rank(c, LocalSGDConfig(every=1)))
    assert_same(local, by_step(run_threads(3, lambda c: on_rank(c, AllReduceConfig()))))


@pytest.mark.parametrize("rule", ["average", "slowmo", "nesterov", "noloco"])
def test_outer_rules_do_to_stacked_workers_what_they_do_to_each(rule):
    apply = {
        "average": lambda s, m, d: outer_average_(s, d),
        "slowmo": lambda s, m, d: outer_slowmo_(s, m, d, lr=0.1, alpha=0.9, beta=0.5),
        "nesterov": lambda s, m, d: outer_nesterov_(s, m, d, lr=0.7, momentum=0.9),
        "noloco": lambda s, m, d: outer_noloco_(s, m, d, lr=0.7, momentum=0.5),
    }[rule]
    draw = torch.Generator().manual_seed(3)
    shapes = [(3, 2), (5,)]
    stacked = [
        [torch.randn(4, *shape, generator=draw, dtype=torch.float64) for shape in shapes]
        for _ in range(3)
    ]
    separate = [[[t[w].clone() for t in tensors] for tensors in stacked] for w in range(4)]
    apply(*stacked)
    for w, (starts, momenta, _) in enumerate(separate):
        apply(*separate[w])
        for tensors, one in ((stacked[0], starts), (stacked[1], momenta)):
            assert all(torch.equal(t[w], o) for t, o in zip(tensors, one, strict=True))


def test_slowmo_at_a_rate_of_zero_divides_by_nothing():
    start, u, moved = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([0.25])
    outer_slowmo_([start], [u], [moved], lr=0.0, alpha=0.5, beta=0.5)
    assert (start.item(), u.item()) == (0.875, 1.0)


class Gate:
    """Delays all messages of a rank while it is closed; fails if one waits too long."""

    def __init__(self, inner):
        self._inner, self.open = inner, threading.Event()
        self.open.set()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def exchange(self, sends, receives):
        assert self.open.wait(10), "a step waited for a fragment that was to travel beside it"
        self._inner.exchange(sends, receives)


def test_steps_go_on_while_a_fragment_travels():
    config = DiLoCoConfig(every=4, delay=2, mix=0.5, algorithm="ring")

    def on_rank(transport):
        gate = Gate(transport)
        rank, history = Rank(config, gate), []
        for step in range(STEPS):
            if (step + 1) % 4 == 0:
                gate.open.clear()  # it leaves now,
            if (step + 1) % 4 == 2:
                gate.open.set()  # and nobody asks for it before this step ends
            rank.step(step)
            history.append(rank.weights())
        gate.open.set()
        rank.strategy.close()
        return history

    assert_same(run_threads(3, on_rank), streaming(3, 1, 2, 0.5))


KINDS = {
    "slowmo": ["strategy.every=2"],
    "diloco": ["strategy.every=4", "strategy.fragments=2", "strategy.delay=1", "strategy.mix=0.5"],
    "noloco": ["strategy.every=2"],
}
RUNS = [(1, 3, 20), (2, 4, 2), (3, 2, 9), (4, 1, 7)]
"""Steps before the cut, ranks, batch; two samples leave two of four ranks without."""


def settings_of(kind):
    return [f"strategy.kind={kind}", *KINDS[kind]]


@pytest.mark.parametrize(("cut", "size", "batch"), RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_anywhere_and_resumed_is_one_that_never_stopped(
    tmp_path, kind, cut, size, batch
):
    settings = [f"train.batch={batch}", *(f"train.{what}_every=1000" for what in ("eval", "save"))]
    settings += settings_of(kind)
    whole = no_trace.loaded_run(tmp_path, *settings, "train.steps=9")
    undisturbed = no_trace.run(size, whole, saves=False)
    no_trace.run(size, no_trace.loaded_run(tmp_path, *settings, f"train.steps={cut}"))
    assert no_trace.run(size, whole, resume=True) == undisturbed


@pytest.mark.parametrize("often", ["save", "eval"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_saved_or_evaluated_after_every_step_is_one_that_never_was(tmp_path, kind, often):
    rare = "eval" if often == "save" else "save"
    settings = ["train.batch=9", "train.steps=9", f"train.{rare}_every=1000", *settings_of(kind)]
    looked_at = no_trace.run(3, no_trace.loaded_run(tmp_path, *settings, f"train.{often}_every=1"))
    calm = no_trace.loaded_run(tmp_path, *settings, f"train.{often}_every=1000")
    undisturbed = no_trace.run(3, calm, saves=False)
    assert looked_at == undisturbed
    weights = [rank["0.weight"] for rank in undisturbed]
    assert weights[0] != weights[1], "ranks that were one model would show nothing"


@pytest.mark.parametrize(
    "again",
    [lambda strategy: strategy.restore_local(), lambda strategy: strategy.begin(5, 0, True, LR)],
)
def test_consolidate_gives_the_exact_mean_and_each_rank_gets_its_own_back(again):
    def on_rank(transport):
        rank = Rank(DiLoCoConfig(every=4, delay=2, mix=0.5), transport)
        for step in range(5):
            rank.step(step)
        own = rank.weights()
        rank.strategy.consolidate()
        rank.strategy.consolidate()
        mean = rank.weights()
        again(rank.strategy)
        back = rank.weights()
        rank.strategy.close()
        return own, mean, back

    found = run_threads(3, on_rank)
    for k in LAYERS:
        expected = np.mean([own[k] for own, _, _ in found], axis=0)
        for own, mean, back in found:
            np.testing.assert_allclose(mean[k], expected, rtol=0, atol=1e-14)
            assert (own[k] == back[k]).all()


def test_consolidate_waits_for_fragments_in_flight():
    def on_rank(transport):
        gate = Gate(transport)
        rank = Rank(DiLoCoConfig(every=4, delay=3, algorithm="ring"), gate)
        for step in range(3):
            rank.step(step)
        gate.open.clear()
        rank.step(3)
        threading.Timer(0.2, gate.open.set).start()
        rank.strategy.consolidate()
        opened = gate.open.is_set()
        rank.strategy.close()
        return opened

    assert run_threads(2, on_rank) == [True, True]


def test_with_other_ranks_a_run_begins_anew_from_one_model():
    def on_rank(transport):
        rank = Rank(DiLoCoConfig(every=4, delay=2), transport)
        for step in range(5):
            rank.step(step)
        with torch.no_grad():
            for parameter in rank.model.parameters():
                parameter.fill_(1.0)
        rank.strategy.load_local_state({})
        state = rank.strategy.local_state()
        rank.strategy.close()
        return state

    for state in run_threads(2, on_rank):
        kept = {name: t for name, t in state.items() if name.startswith("fragment-")}
        assert kept.keys() == {"fragment-0/start", "fragment-0/momentum"}
        assert (kept["fragment-0/start"] == 1).all()
        assert not kept["fragment-0/momentum"].any()


def test_rounds_begin_anew_where_a_rank_is_not_at_the_mean_that_it_looks_at():
    def on_rank(transport):
        rank = Rank(LocalSGDConfig(every=4), transport)
        for step in range(3):
            rank.step(step)
        rank.strategy.consolidate()
        rank.strategy.load_local_state({})
        start = rank.strategy.local_state()["fragment-0/start"]
        rank.strategy.begin(3, 0, True, LR)
        rank.strategy.close()
        return start, torch.cat([p.detach().flatten() for p in rank.model.parameters()])

    for start, own in run_threads(2, on_rank):
        assert torch.equal(start, own)


def test_a_checkpoint_of_other_fragments_is_refused_with_what_to_do():
    def on_rank(transport):
        kept = Rank(DiLoCoConfig(every=4, fragments=2), transport).strategy.local_state()
        Rank(DiLoCoConfig(every=4), transport).strategy.load_local_state(kept)

    with pytest.raises(CheckpointError, match=r"2 fragments began, the run has 1: set strategy\."):
        run_threads(2, on_rank)


class Forked(nn.Module):
    """Uses another layer on every rank."""

    def __init__(self, rank):
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)])
        self.mine = 1 - rank  # the order of names is not that of ranks

    def forward(self, x):
        return self.ways[self.mine](x)


def test_optimizer_state_of_some_ranks_has_equal_names_on_all_and_returns_to_those_ranks():
    def on_rank(transport):
        def attached():
            strategy = build_strategy(LocalSGDConfig(every=2), transport)
            return strategy, *strategy.attach(Forked(transport.rank), sgd)

        strategy, model, optimizer = attached()
        strategy.begin(0, 0, True, LR)
        model(torch.ones(1, 2)).sum().backward()
        strategy.after_backward()
        optimizer.step()
        names = {id(p): name for name, p in model.named_parameters()}
        had = optimizer_tensors(optimizer, names)
        state = strategy.local_state()
        other, again, anew = attached()
        for parameter in again.parameters():  # as of rank 0
            anew.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
        other.load_local_state(state)
        got = optimizer_tensors(anew, {id(p): name for name, p in again.named_parameters()})
        return list(state), had, got

    found = run_threads(2, on_rank)
    assert found[0][0] == found[1][0]
    assert found[0][1].keys() != found[1][1].keys()
    for _, had, got in found:
        assert had.keys() == got.keys()
        assert all(torch.equal(had[name], got[name]) for name in had)


@pytest.mark.parametrize("kind", ["local_sgd", "noloco"])
def test_in_a_loop_of_ones_own_a_look_at_the_mean_leaves_no_trace(kind):
    start = nn.Linear(3, 1).double()

    def on_rank(transport, looks):
        draw = torch.Generator().manual_seed(transport.rank)
        how = {"local_sgd": LocalSGDConfig, "noloco": NoLoCoConfig}[kind](every=3)
        model, optimizer = stretto.distribute(copy.deepcopy(start), sgd, how, transport=transport)
        for _ in range(7):
            if looks:
                stretto.consolidate(model)
                with torch.no_grad():
                    model(torch.ones(1, 3, dtype=torch.float64))
            optimizer.zero_grad()
            model(torch.randn(4, 3, generator=draw).double()).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    looked, undisturbed = (
        run_threads(2, lambda c, looks=looks: on_rank(c, looks)) for looks in (True, False)
    )
    for mine, theirs in zip(looked, undisturbed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
