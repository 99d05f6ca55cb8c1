"""Measured costs of units, for models whose seconds and bytes are known."""

import statistics
import time

import pytest
import torch
from torch import nn

from stretto.comm.in_process_transports import run_threads
from stretto.errors import ConfigError
from stretto.models import GPTConfig, build_model, per_sample_loss
from stretto.optim import AdamConfig, SGDConfig, make_optimizer
from stretto.planner.model_units import called_modules, find_units
from stretto.planner.profile import UnitCost
from stretto.profiler.measure_units import (
    SampleStep,
    max_over_ranks,
    measure_units,
    measure_update,
    optimizer_state_bytes,
    other_bytes,
)
from stretto.profiler.meters import peaks_per_interval
from stretto.profiler.unit_passes import (
    MeteredStep,
    StepEvent,
    UnitEvent,
    interval_owners,
    unit_hooks,
)


class Sleep(torch.autograd.Function):
    """An operation that takes the given seconds in forward and backward."""

    @staticmethod
    def forward(ctx, x, weight, forward_s, backward_s):
        ctx.save_for_backward(x, weight)
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        time.sleep(ctx.seconds)
        return gradient * weight, (gradient * x).sum(0), None, None


class Slow(nn.Module):
    def __init__(self, forward_s, backward_s):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.seconds = forward_s, backward_s

    def forward(self, x):
        return Sleep.apply(x, self.weight, *self.seconds)


def found(model, forward, least=0):
    with torch.no_grad():
        calls = called_modules(model, forward)
    return find_units(model, least, calls)


def measured(model, forward, repeats=3, batch=(), least=0):
    costs = measure_units(model, found(model, forward, least), SampleStep(forward, batch), repeats)
    return {cost.name: cost for cost in costs}


@pytest.mark.timed
def test_seconds_of_units_are_right_and_add_up_to_the_step():
    seconds_by_unit = [(0.01, 0.03), (0.02, 0.01), (0.0, 0.02)]
    model, x = nn.Sequential(*(Slow(*seconds) for seconds in seconds_by_unit)), torch.ones(4, 8)

    def forward():
        loss = model(x).sum()
        time.sleep(0.005)  # the loss, which is the last unit's backward
        return loss

    costs = measured(model, forward, repeats=5)
    for cost, (forward_s, backward_s) in zip(costs.values(), seconds_by_unit, strict=True):
        more = 0.005 if cost.name == "2" else 0.0
        assert cost.forward_s == pytest.approx(forward_s, abs=0.003)
        assert cost.backward_s == pytest.approx(backward_s + more, abs=0.003)
    steps = []
    for _ in range(5):
        start_s = time.perf_counter()
        forward().backward()
        steps.append(time.perf_counter() - start_s)
    total_s = sum(cost.forward_s + cost.backward_s for cost in costs.values())
    assert total_s == pytest.approx(statistics.median(steps), rel=0.05)


@pytest.mark.timed
def test_time_between_units_belongs_to_the_next_one():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Slow(0, 0), Slow(0, 0)

        def forward(self, x):
            x = self.one(x)
            x = Sleep.apply(x, torch.ones(8), 0.02, 0.03)
            x = self.two(x)
            time.sleep(0.01)
            return x

    model, x = Between(), torch.ones(4, 8)
    costs = measured(model, lambda: model(x).sum())
    # In forward it belongs to unit two, with the time after it; in backward to unit one.
    assert costs["two"].forward_s == pytest.approx(0.03, abs=0.004)
    assert costs["one"].backward_s == pytest.approx(0.03, abs=0.004)
    assert costs["one"].forward_s + costs["two"].backward_s < 0.004


def gpt(tied=False, **more):
    model = build_model(GPTConfig(blocks=3, width=32, context=16, tied=tied, **more), 0)
    tokens = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    return model, (inputs, targets), lambda: per_sample_loss(model(inputs), targets).mean()


def test_bytes_of_a_chain_match_sums_made_by_hand():
    model = nn.Sequential(nn.Linear(50, 100), nn.ReLU(), nn.Linear(100, 200), nn.Linear(200, 10))
    batch = torch.ones(64, 50)
    costs = measured(model, lambda: model(batch).square().sum(), batch=(batch,))
    kept = {name: cost.activation_bytes for name, cost in costs.items()}
    inputs = {name: cost.input_bytes for name, cost in costs.items()}
    # A matrix product saves its input. ReLU saves its output, which is the next input. The square
    # saves the last output. The batch exists before the step.
    row = 64 * 4
    assert kept == {"0": 0, "2": 100 * row, "3": (200 + 10) * row}
    assert inputs == {"0": 0, "2": 100 * row, "3": 200 * row}
    # At the end of unit 2's backward the gradients of its output, input and weight exist.
    assert costs["2"].workspace_bytes >= (200 + 100) * row
    # By then the larger gradients of later units have been freed.
    assert costs["0"].workspace_bytes < 4 * (100 * 200 + 200 * 10)
    assert costs["0"].tensors == (50 * 100, 100)
    assert costs["0"].numel == 50 * 100 + 100


def test_activations_and_workspace_of_a_block_have_the_expected_size():
    model, batch, forward = gpt()
    costs = list(measured(model, forward, repeats=1, batch=batch).values())
    blocks = [cost for cost in costs if cost.name.startswith("blocks.")]
    assert blocks[0].activation_bytes == blocks[1].activation_bytes
    row = 4 * 16 * 4
    # Inputs of norm and qkv; q, k, v and output of attention; inputs of out, norm and the MLP.
    assert blocks[0].activation_bytes > (1 + 1 + 3 + 1 + 1 + 1 + 4 + 4) * 32 * row
    assert 0 < blocks[0].workspace_bytes < blocks[0].activation_bytes
    assert blocks[0].input_bytes == 32 * row


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_that_are_read_or_used_several_times_are_units_as_well(tied):
    model, batch, forward = gpt(tied)
    costs = measured(model, forward, batch=batch)
    assert costs["positions"].used_often
    assert costs["tokens"].used_often is tied
    assert ("head" in costs) is not tied
    assert sum(cost.numel for cost in costs.values()) == sum(p.numel() for p in model.parameters())
    assert all(cost.backward_s > 0 for cost in costs.values())


def test_measuring_leaves_no_gradients_and_no_hooks():
    model, batch, forward = gpt()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measured(model, forward, repeats=1, batch=batch)
    assert all(p.grad is None for p in model.parameters())
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Twice(nn.Module):
    """A model with a frozen layer, a layer called twice, an unused layer, and a buffer."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.first, self.again, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.idle = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("table", torch.zeros(100))

    def forward(self, x):
        x = self.again(self.first(self.frozen(x)))
        return self.last(self.again(x)) * self.scale


def test_models_with_frozen_unused_and_repeated_layers_are_measured():
    model, x = Twice(), torch.ones(4, 8)
    costs = measured(model, lambda: model(x).sum(), batch=(x,))
    assert set(costs) == {"Twice", "first", "again", "last", "idle"}
    assert costs["idle"].activation_bytes == 0
    assert other_bytes(model, [x]) == 4 * (8 * 8 + 8 + 100 + 4 * 8)


def test_recomputation_in_backward_counts_as_backward():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Slow(0.01, 0.01), Slow(0.0, 0.0)

        def forward(self, x):
            run = torch.utils.checkpoint.checkpoint
            return self.two(run(self.one, x, use_reentrant=False))

    model, x = Again(), torch.ones(4, 8, requires_grad=True)
    step = MeteredStep(units := found(model, lambda: model(x).sum()))
    with unit_hooks(model, units, step.record):
        step.run(lambda: model(x).sum())
    kinds = [event.kind for event in step.events]
    assert StepEvent.FORWARD_BEGIN not in kinds[kinds.index(StepEvent.LOSS_END) :]
    costs = measured(model, lambda: model(x).sum())
    assert costs["one"].forward_s == pytest.approx(0.01, abs=0.008)
    assert costs["one"].backward_s >= 0.02


def test_a_loss_without_trainable_parameters_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        measured(model, lambda: torch.ones(1).sum() if torch.is_grad_enabled() else model(X).sum())
    with pytest.raises(ConfigError, match="0 repeats"):
        measured(model, lambda: model(X).sum(), repeats=0)


X = torch.ones(1, 2)
F, FO, MO = StepEvent.FORWARD_BEGIN, StepEvent.FORWARD_END, StepEvent.MODEL_END
L, B, G = StepEvent.LOSS_END, StepEvent.BACKWARD_BEGIN, StepEvent.GRADIENT_READY
O = StepEvent.BACKWARD_END  # noqa: E741


def slots(always_active, *events):
    return [
        f"{'b' if slot.backward else 'f'}{slot.unit}"
        for slot in interval_owners([UnitEvent(*event) for event in events], always_active)
    ]


END = ((L,), (O,))


@pytest.mark.parametrize(
    ("always_active", "events", "owners"),
    [
        ([0], [(F, 0), (FO, 0), (MO,), *END], "f0 f0 f0 b0 b0"),
        ([0, 0], [(F, 0), (FO, 0), (F, 1), (FO, 1), (MO,), *END], "f0 f0 f1 f1 f1 b1 b1"),
        ([0, 0], [(F, 0), (F, 1), (FO, 1), (FO, 0), *END], "f0 f0 f1 f0 b1 b1"),  # inside another
        # Unit 0 is always active and encloses unit 1: it has the time in which unit 1 does not run.
        ([1, 0], [(F, 0), (F, 1), (FO, 1), (FO, 0), (MO,), *END], "f0 f1 f1 f1 f1 b1 b1"),
        ([1, 0], [(F, 0), (FO, 0), (F, 1), (FO, 1), *END], "f0 f0 f1 f1 b1 b1"),
    ],
)
def test_owners_of_the_intervals_of_a_forward(always_active, events, owners):
    assert slots([bool(flag) for flag in always_active], *events) == owners.split()


@pytest.mark.parametrize(
    ("events", "owners"),
    [
        ([(B, 1), (G, 1), (G, 1), (B, 0), (G, 0), (O,)], "b1 b1 b1 b0 b0 b0"),
        ([(B, 1), (G, 1), (B, 0), (G, 1), (G, 0), (O,)], "b1 b1 b1 b0 b0 b0"),
        # Unit 1 is called twice, with unit 0 in between.
        ([(B, 1), (B, 0), (G, 0), (B, 1), (G, 1), (O,)], "b1 b1 b0 b1 b1 b1"),
        ([(B, 1), (G, 0), (G, 1), (O,)], "b1 b1 b1 b1"),
        ([(O,)], "b1"),
    ],
)
def test_owners_of_the_intervals_of_a_backward(events, owners):
    assert slots([False, False], (L,), *events)[1:] == owners.split()


def test_the_peak_of_each_interval_is_relative_to_the_start():
    changes = [(1, 100), (12, 50), (13, -50), (14, 20), (22, -20), (23, 5), (31, 999)]
    assert peaks_per_interval(changes, [10, 20, 30]) == [50, 20]
    assert peaks_per_interval(changes, [10, 11]) == [0]


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [(SGDConfig(momentum=0.0), 0), (SGDConfig(momentum=0.9), 4), (AdamConfig(), 8)],
)
def test_optimizer_state_is_counted_per_element(config, num_bytes):
    parameters = [nn.Parameter(torch.ones(30, 40)), nn.Parameter(torch.ones(40))]
    optimizer = make_optimizer(config, peak_lr=0.1)(parameters)
    assert measure_update(optimizer, repeats=2) > 0
    assert optimizer_state_bytes(optimizer) == num_bytes
    assert all(parameter.grad is None for parameter in parameters)


def test_maxima_over_ranks_add_up_to_the_step_of_the_slowest_rank():
    forward_s = [[1.0, 3.0], [2.0, 4.0]]  # of each rank, of each unit

    def cost(rank):
        return [
            UnitCost(
                name=str(unit),
                numel=5,
                forward_s=forward_s[rank][unit],
                backward_s=1.0 if rank else 4.0,
                activation_bytes=7 * rank,
                tensors=(2, 3),
            )
            for unit in range(2)
        ]

    for costs in run_threads(2, lambda transport: max_over_ranks(cost(transport.rank), transport)):
        assert [c.name for c in costs] == ["0", "1"]
        assert [c.activation_bytes for c in costs] == [7, 7]
        assert isinstance(costs[0].activation_bytes, int)
        assert costs[0].tensors == (2, 3)
        # Rank 0 takes 12 seconds and rank 1 takes 8. The maxima would add up to 14.
        assert sum(c.forward_s + c.backward_s for c in costs) == pytest.approx(12)
        assert costs[1].forward_s / costs[0].forward_s == pytest.approx(2)
