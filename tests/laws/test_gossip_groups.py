"""Groups of ranks equal workers with more samples: histories against NumPy, members to the bit."""

import threading
from collections import defaultdict

import numpy as np
import pytest
import torch

from stretto.comm.in_process_transports import RecordingTransport, run_threads
from stretto.strategies import CrossoverConfig, DPSGDConfig, SGPConfig, build_strategy
from stretto.strategies.distribute import distribute
from tests.laws.test_gossip import (
    CUTS,
    LR,
    MOMENTUM,
    SAMPLES,
    STEPS,
    Chain,
    Irregular,
    Workers,
    batches,
    gradients,
    in_flight,
    in_two_pieces,
    initial,
    mixed,
    sgp,
    trained,
)

SHAPES = [(4, 2), (6, 2), (8, 4)]
"""Workers, and groups of them: shards of a half and of a third; peers that change."""
SLOW_S = 5.0
"""A wait longer than this is a failure."""


class Groups(Workers):
    """Groups in NumPy: each a worker with the samples of all its members."""

    def __init__(self, workers, groups):
        super().__init__(groups)
        self.inputs, self.targets = (
            a.reshape(len(a), groups, -1, a.shape[-1]) for a in batches(workers)
        )


def of_ranks(expected, workers):
    """Return the history of every rank for that of every group."""
    return [
        [groups[rank * len(groups) // workers] for rank in range(workers)] for groups in expected
    ]


def assert_same(history, expected):
    """Compare with the history by group; members of a group have the same bits."""
    workers = len(history)
    for step, groups in enumerate(of_ranks(expected, workers)):
        for rank in range(workers):
            for mine, reference in zip(history[rank][step], groups[rank], strict=True):
                np.testing.assert_allclose(
                    mine, reference, rtol=0, atol=1e-12, err_msg=f"{step} {rank}"
                )
    assert_members_equal(history, len(expected[0]))


def assert_members_equal(history, groups):
    width = len(history) // groups
    for rank, steps in enumerate(history):
        for mine, firsts in zip(steps, history[rank - rank % width], strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(mine, firsts, strict=True))


def differences(config, workers):
    """Return the history of averages with peers that are applied ``delay`` rounds later."""
    expected, left = [], []
    for step in range(STEPS):
        workers.adapt(step)
        if not config.delay:
            left.append((step, workers.copy()))
        if len(left) >= max(1, config.delay):
            number, was = left.pop(0)
            then = mixed(was, config.build_topology(), number)
            for x, old, new in zip(workers.x, was, then, strict=True):
                x[:] = [x[layer] + new[layer] - old[layer] for layer in range(2)]
        if config.delay:
            left.append((step, workers.copy()))
        expected.append(workers.copy())
    return expected


@pytest.mark.parametrize(("workers", "groups"), SHAPES)
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_crossover_of_groups_averages_their_models(workers, groups, delay, reads):
    config = CrossoverConfig(**CUTS, seed=5, delay=delay, groups=groups)
    expected = differences(config, Groups(workers, groups))
    assert_same(trained(config, workers, reads=reads), expected)


@pytest.mark.parametrize(("workers", "groups"), SHAPES)
def test_dpsgd_of_groups_adds_a_groups_update_to_what_all_had_before_it(workers, groups):
    config = DPSGDConfig(groups=groups)
    reading, expected = Groups(workers, groups), []
    for step in range(STEPS):
        u = reading.directions(step)
        reading.x = [
            [m - LR * d for m, d in zip(mix, direction, strict=True)]
            for mix, direction in zip(mixed(reading.x, config.build_topology(), 0), u, strict=True)
        ]
        expected.append(reading.copy())
    assert_same(trained(config, workers), expected)


@pytest.mark.parametrize(
    ("kind", "workers", "groups"), [(SGPConfig, *shape) for shape in SHAPES] + [(Irregular, 8, 4)]
)
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_sgp_of_groups_has_one_mass_for_each(kind, workers, groups, delay, reads):
    config = kind(delay=delay, groups=groups)
    expected, masses = sgp(config, Groups(workers, groups))
    found = defaultdict(dict)

    def see(strategy, rank, step):
        found[step][rank] = [mixer.mass for mixer in strategy.inspect().mixers]

    assert_same(trained(config, workers, reads=reads, see=see), expected)
    width = workers // groups
    for step, of_rank in found.items():
        for rank, mine in of_rank.items():
            assert mine == of_rank[rank - rank % width]
            assert mine == pytest.approx([masses[step][rank // width]] * len(mine), abs=1e-12)


def synchronous(workers):
    """Return the history of one model that all samples of a step train."""
    reading, expected = Groups(workers, 1), []
    for step in range(STEPS):
        reading.adapt(step)
        expected.append(reading.copy())
    return expected


EACH = [
    CrossoverConfig(**CUTS),
    CrossoverConfig(**CUTS, delay=1),
    DPSGDConfig(),
    SGPConfig(),
    SGPConfig(delay=1),
]


def named(config):
    return f"{config.kind}-{config.delay}"


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("config", EACH, ids=named)
def test_one_group_is_synchronous_sgd(config, reads):
    one = config.model_copy(update={"groups": 1})
    assert_same(trained(one, 4, reads=reads), synchronous(4))


def sent_and_learned(config, workers):
    """Return every message of each rank by lane, and its weights after every step."""
    inputs, targets = batches(workers)

    def on_rank(transport):
        recording = RecordingTransport(transport)
        strategy = build_strategy(config, recording, calls=("first", "second"))
        model, _ = strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=LR, momentum=MOMENTUM))
        recording.sent.clear()
        history = []
        for step in range(STEPS):
            x, y = inputs[step, transport.rank], targets[step, transport.rank]
            one_step(strategy, model, x, y, workers, step=step)
            history.append([p.detach().numpy().copy() for p in model.parameters()])
        for mixer in strategy.inspect().mixers:
            mixer.wait()
        strategy.close()
        return recording.sent, history

    return run_threads(workers, on_rank)


def one_step(strategy, model, x, y, workers, *, step=0, update=True):
    strategy.begin(step, 0, True, LR)
    error = model(torch.from_numpy(x)) - torch.from_numpy(y)
    (error.square().sum() / (2 * SAMPLES * workers)).backward()
    step_gradients = strategy.after_backward(update=update)
    if update:
        if not step_gradients.is_applied:
            strategy.full_optimizer_state().step()
        strategy.after_update()
    return step_gradients


def by_lane(sent):
    return sorted(sent, key=lambda message: message.lane)


@pytest.mark.parametrize("config", EACH, ids=named)
def test_as_many_groups_as_ranks_are_none_to_the_bit_and_to_the_message(config):
    flat = sent_and_learned(config, 4)
    grouped = sent_and_learned(config.model_copy(update={"groups": 4}), 4)
    for (sent, history), (same, again) in zip(flat, grouped, strict=True):
        assert by_lane(sent) == by_lane(same)
        for mine, other in zip(history, again, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize(("config", "more"), [(EACH[1], 0), (DPSGDConfig(**CUTS), 0), (EACH[4], 1)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_rank_sends_other_groups_its_shard_and_no_more(config, more, groups):
    workers = 8
    config = config.model_copy(update={"groups": groups, **CUTS})
    width = workers // groups
    numels = [int(np.prod(w.shape)) + more for w in initial()]
    for rank, (sent, _) in enumerate(sent_and_learned(config, workers)):
        outside = [m for m in sent if m.peer // width != rank // width]
        assert {m.peer % width for m in outside} <= {rank % width}
        peers = len(config.build_topology()(0, groups, 0, 0).sends)
        mine = [len(range(n)[slice(*shard(n, width, rank % width))]) for n in numels]
        assert sum(m.num_bytes for m in outside) == STEPS * peers * 8 * sum(mine)
        assert all(abs(m - n / width) < 1 for m, n in zip(mine, numels, strict=True))


def shard(numel, width, index):
    """Return the start and end of shard ``index``; sizes differ by one at most."""
    sizes = [len(part) for part in np.array_split(np.arange(numel), width)]
    return sum(sizes[:index]), sum(sizes[: index + 1])


@pytest.mark.parametrize("config", EACH, ids=named)
def test_masses_and_means_are_kept_while_groups_mix(config):
    config = config.model_copy(update={"groups": 4})

    def on_rank(transport):
        strategy = build_strategy(config, transport)
        model, _ = strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=0.0))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(transport.rank // 2)
        records = []
        for step in range(8):
            strategy.begin(step, 0, True, 0.0)
            strategy.after_backward()
            strategy.after_update()
            mixers = strategy.inspect().mixers
            for mixer in mixers:
                mixer.wait()
            records.append(sum(mixer.mass + in_flight(mixer) for mixer in mixers))
        strategy.consolidate()
        consolidated = [p.detach().numpy().copy() for p in model.parameters()]
        strategy.close()
        return records, consolidated, len(mixers)

    found = run_threads(8, on_rank)
    for step in range(8):
        masses = [records[step] for records, _, _ in found]
        assert sum(masses) == pytest.approx(8 * found[0][2], abs=1e-12)
    for _, consolidated, _ in found:
        for value, first in zip(consolidated, initial(), strict=True):
            np.testing.assert_allclose(value, first + 1.5, rtol=0, atol=1e-12)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_parameter_that_one_member_used_is_updated_on_all(delay):
    config = CrossoverConfig(**CUTS, delay=delay, groups=2)
    early, late = (in_two_pieces(config, reads=reads) for reads in (False, True))
    for rank, (mine, other) in enumerate(zip(early, late, strict=True)):
        for name, value in mine.items():
            torch.testing.assert_close(value, other[name], rtol=0, atol=1e-12)
            assert torch.equal(value, early[rank - rank % 2][name])


def test_samples_weigh_the_same_wherever_they_are_in_a_group():
    """One member has all of its group's samples, the other none: no backward, no gradient."""
    inputs, targets = batches(4, 1)
    x = [np.concatenate(inputs[0, :2]), None, *inputs[0, 2:]]
    y = [np.concatenate(targets[0, :2]), None, *targets[0, 2:]]

    def on_rank(transport):
        strategy = build_strategy(CrossoverConfig(**CUTS, groups=2, delay=1), transport)
        model, _ = strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=LR))
        strategy.begin(0, 0, True, LR)
        if x[transport.rank] is not None:
            error = model(torch.from_numpy(x[transport.rank])) - torch.from_numpy(y[transport.rank])
            (error.square().sum() / (2 * SAMPLES * 4)).backward()
        strategy.after_backward()
        strategy.after_update()
        learned = [p.detach().numpy().copy() for p in model.parameters()]
        strategy.close()
        return learned

    found = run_threads(4, on_rank)
    reading = Groups(4, 2)
    reading.inputs, reading.targets = (
        a[:1].reshape(1, 2, -1, a.shape[-1]) for a in (inputs, targets)
    )
    reading.adapt(0)
    for rank, learned in enumerate(found):
        for mine, reference in zip(learned, reading.x[rank // 2], strict=True):
            np.testing.assert_allclose(mine, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reads", [False, True])
def test_gradients_that_somebody_reads_are_the_groups_also_of_a_step_that_is_left_out(reads):
    inputs, targets = batches(4)

    def on_rank(transport):
        strategy = build_strategy(CrossoverConfig(**CUTS, groups=2, delay=1), transport)
        strategy.reads_gradients = reads
        model, optimizer = strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=LR))
        strategy.is_finite = lambda: False
        # The last layer's sum is there before backward is over: it could be updated by then.
        segments = strategy.inspect().segment_queue
        model.first.weight.register_hook(lambda _grad: segments.started[0].wait())
        x, y = inputs[0, transport.rank], targets[0, transport.rank]
        step_gradients = one_step(strategy, model, x, y, 4, update=False)
        norm, named = float(step_gradients.norm()), dict(strategy.named_gradients())
        kept = {name: grad.numpy().copy() for name, grad in named.items()}
        optimizer.zero_grad(set_to_none=True)
        same = [p.detach().numpy().copy() for p in model.parameters()]
        rounds_in_flight = [mixer.rounds_in_flight for mixer in strategy.inspect().mixers]
        strategy.is_finite = lambda: True
        one_step(strategy, model, x, y, 4)
        learned = [p.detach().numpy().copy() for p in model.parameters()]
        strategy.close()
        return norm, kept, same, rounds_in_flight, learned

    reading = Groups(4, 2)
    for rank, (norm, kept, same, rounds_in_flight, learned) in enumerate(run_threads(4, on_rank)):
        group = rank // 2
        reference = gradients(initial(), reading.inputs[0, group], reading.targets[0, group])
        for name, grad in zip(("first.weight", "second.weight"), reference, strict=True):
            np.testing.assert_allclose(kept[name], grad, rtol=0, atol=1e-12)
        assert norm == pytest.approx(np.sqrt(sum((g**2).sum() for g in reference)), abs=1e-12)
        assert all(np.array_equal(a, b) for a, b in zip(same, initial(), strict=True))
        assert not any(rounds_in_flight)
        for mine, first, grad in zip(learned, initial(), reference, strict=True):
            np.testing.assert_allclose(mine, first - LR * grad, rtol=0, atol=1e-12)


class Held(RecordingTransport):
    """Holds messages on some lanes until ``go`` is set."""

    def __init__(self, inner, lanes):
        super().__init__(inner)
        self.lanes, self.go, self.waited = lanes, threading.Event(), False

    def exchange(self, sends, receives):
        if {p2p_op.lane for p2p_op in (*sends, *receives)} & self.lanes:
            self.waited |= not self.go.wait(SLOW_S)
        super().exchange(sends, receives)


def test_sums_inside_travel_beside_backward_and_rounds_beside_the_next_step():
    inputs, targets = batches(4)
    gossip, inside = {1, 2}, {3}

    def on_rank(transport):
        held = Held(transport, inside)
        strategy = build_strategy(CrossoverConfig(**CUTS, groups=2, delay=1, lanes=2), held)
        model, _ = strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=LR))
        # The last layer's sum is held until the first layer has its gradient.
        release = model.first.weight.register_hook(lambda _grad: held.go.set())
        one_step(strategy, model, inputs[0, transport.rank], targets[0, transport.rank], 4)
        release.remove()
        # This step's rounds, all of them, are held until the next forward is over.
        mixers = strategy.inspect().mixers
        for mixer in mixers:
            mixer.wait()
        held.lanes, held.go = gossip, threading.Event()
        one_step(strategy, model, inputs[1, transport.rank], targets[1, transport.rank], 4, step=1)
        model(torch.from_numpy(inputs[2, transport.rank]))
        held.go.set()
        for mixer in mixers:
            mixer.wait()
        strategy.close()
        return held.waited, {message.lane for message in held.sent}

    for waited, lanes in run_threads(4, on_rank):
        assert not waited
        assert gossip | inside <= lanes


def test_segments_with_fewer_elements_than_members_are_sent_by_some_members():
    def on_rank(transport):
        recording = RecordingTransport(transport)
        strategy = build_strategy(SGPConfig(groups=2, delay=1), recording)
        model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
        strategy.attach(model, lambda p: torch.optim.SGD(p, lr=0.0))
        with torch.no_grad():
            model.weight.fill_(transport.rank // 5)
        for step in range(3):
            strategy.begin(step, 0, True, 0.0)
            strategy.after_backward()
            strategy.after_update()
        strategy.consolidate()
        mean = model.weight.detach().clone()
        strategy.close()
        return mean, recording.sent

    for mean, sent in run_threads(10, on_rank):
        assert all(message.num_bytes for message in sent)
        torch.testing.assert_close(mean, torch.full((1, 2), 0.5, dtype=torch.float64))


def test_in_a_loop_of_ones_own_a_groups_gradient_is_the_mean_of_its_members():
    inputs, targets = batches(4)

    def on_rank(transport):
        model, optimizer = distribute(
            Chain(),
            lambda p: torch.optim.SGD(p, lr=LR, momentum=MOMENTUM),
            CrossoverConfig(**CUTS, groups=2),
            transport=transport,
        )
        history = []
        for step in range(STEPS):
            x, y = (torch.from_numpy(a[step, transport.rank]) for a in (inputs, targets))
            (model(x) - y).square().sum(1).mean().div(2).backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append([p.detach().numpy().copy() for p in model.parameters()])
        return history

    config = CrossoverConfig(**CUTS)
    assert_same(run_threads(4, on_rank), differences(config, Groups(4, 2)))


def test_waits_at_the_end_of_a_step_are_reported_once():
    """The caller times `after_backward`; its waits are not those of backward."""
    inputs, targets = batches(4)

    def on_rank(transport):
        held = Held(transport, {2})
        strategy = build_strategy(CrossoverConfig(segments="whole", groups=2, delay=1), held)
        model, _ = strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=LR))
        records = []
        for step in range(3):
            held.go = threading.Event()
            release = threading.Timer(0.05, held.go.set)
            release.start()
            x, y = inputs[step, transport.rank], targets[step, transport.rank]
            step_gradients = one_step(strategy, model, x, y, 4, step=step)
            records.append((step_gradients.waited_s, step_gradients.updated_s))
            release.join()
        strategy.close()
        return records

    for records in run_threads(4, on_rank):
        assert all(waited_s == 0.0 and updated_s < 0.05 for waited_s, updated_s in records)


@pytest.mark.parametrize(("groups", "is_local"), [(None, True), (4, True), (2, False), (1, False)])
def test_ranks_that_share_a_model_check_their_steps_together(groups, is_local):
    def on_rank(transport):
        strategy = build_strategy(CrossoverConfig(groups=groups), transport)
        strategy.attach(Chain(), lambda p: torch.optim.SGD(p, lr=LR))
        strategy.close()
        return strategy.ranks_step_independently

    assert run_threads(4, on_rank) == [is_local] * 4
