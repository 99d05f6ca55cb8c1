"""Laws of every optimizer and update rule, against PyTorch's and against plain arithmetic."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto.checkpoint.optimizer_state import flatten_optimizer, restore_optimizer_
from stretto.optim import (
    LAMB,
    LARS,
    SGD,
    Adam,
    AdamW,
    Moments,
    Momentum,
    TrustRatioOptions,
    local_norms,
    split_by_decay,
)
from stretto.optim.layer_optimizer import lamb_ratio, lars_ratio, scale_layers_
from stretto.optim.rules import (
    adam_directions,
    add_scaled_,
    add_weight_decay,
    decoupled_decay_,
    momentum_step_,
    update_moments_,
)

SHAPES = [(4, 3), (2, 3, 2), (5,), (), (3, 1)]
CORRECTED = Momentum(0.9, "inside", momentum_correction=True)
OURS = {
    "sgd": lambda p, lr: SGD(p, lr, weight_decay=0.01),
    "sgd outside": lambda p, lr: SGD(p, lr, momentum=Momentum(0.9), weight_decay=0.01),
    "sgd inside": lambda p, lr: SGD(p, lr, momentum=Momentum(0.9, "inside", nesterov=True)),
    "sgd corrected": lambda p, lr: SGD(p, lr, momentum=CORRECTED, weight_decay=0.01),
    "lars": lambda p, lr: LARS(p, lr, trust=TrustRatioOptions(0.1), weight_decay=0.01),
    "lars corrected": lambda p, lr: LARS(p, lr, trust=TrustRatioOptions(0.1), momentum=CORRECTED),
    "lamb": lambda p, lr: LAMB(p, lr, weight_decay=0.01),
    "adam": lambda p, lr: Adam(p, lr, weight_decay=0.01),
    "adamw": lambda p, lr: AdamW(p, lr, weight_decay=0.01),
}
SCHEDULE = [0.1, 0.02, 0.05, 0.3, 0.3]


def parameters(seed=0, dtype=torch.float64, shapes=SHAPES):
    drawn = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=drawn, dtype=dtype)) for s in shapes]


def gradients(step, like):
    drawn = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=drawn, dtype=torch.float64).to(p.dtype) for p in like]


def run_(optimizer, schedule, first=0):
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for step, lr in enumerate(schedule, first):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for parameter, gradient in zip(held, gradients(step, held), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [p.detach().clone() for p in held]


def assert_close(ours, theirs, tolerance=1e-12):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_equal(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# --- against PyTorch's own optimizers ---

PEERS = {
    "sgd": (lambda p: SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (
        lambda p: SGD(p, 0.1, momentum=Momentum(0.9), weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    ),
    "nesterov": (
        lambda p: SGD(p, 0.1, momentum=Momentum(0.8, nesterov=True), weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True, weight_decay=0.01),
    ),
    "adam": (
        lambda p: Adam(p, 0.1, moments=Moments(0.8, 0.9, 1e-3), weight_decay=0.01),
        lambda p: torch.optim.Adam(p, 0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.01),
    ),
    "adamw": (
        lambda p: AdamW(p, 0.1, moments=Moments(0.8, 0.9, 1e-3), weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, 0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.01),
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_our_optimizers_equal_those_of_pytorch(name):
    ours, theirs = PEERS[name]
    assert_close(run_(ours(parameters()), SCHEDULE), run_(theirs(parameters()), SCHEDULE))


# --- the two orders of momentum ---


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "lars"])
@given(schedule=st.lists(st.floats(1e-4, 10), min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
def test_corrected_momentum_inside_is_momentum_outside(kind, nesterov, schedule):
    def build(momentum):
        if kind == "sgd":
            return SGD(parameters(), 1.0, momentum=momentum, weight_decay=0.01)
        return LARS(
            parameters(), 1.0, momentum=momentum, trust=TrustRatioOptions(0.02), weight_decay=0.01
        )

    inside = Momentum(0.9, "inside", nesterov, momentum_correction=True)
    outside = Momentum(0.9, "outside", nesterov)
    ours, theirs = run_(build(inside), schedule), run_(build(outside), schedule)
    size = max(1.0, *(float(t.abs().max()) for t in theirs))
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).abs().max()) <= 1e-12 * size


def test_without_correction_the_orders_differ_once_the_rate_changes():
    schedule = [0.1, 0.1, 0.01, 0.1]
    inside = run_(SGD(parameters(), 0.1, momentum=Momentum(0.9, "inside")), schedule)
    outside = run_(SGD(parameters(), 0.1, momentum=Momentum(0.9)), schedule)
    assert any(float((a - b).abs().max()) > 0.01 for a, b in zip(inside, outside, strict=True))


def after_a_step_at_zero(momentum):
    """Step with rates 0.5, 0 and 0.25, gradient 1, weight 0; return weights and buffers."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = SGD([weight], 0.5, momentum=momentum)
    seen = []
    for lr in (0.5, 0.0, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        seen.append((float(weight.detach()), float(optimizer.state[weight]["momentum_buffer"])))
    return seen


def test_outside_at_a_rate_of_zero_only_the_buffer_changes():
    assert after_a_step_at_zero(Momentum(0.5)) == [(-0.5, 1.0), (-0.5, 1.5), (-0.9375, 1.75)]


def test_inside_at_a_rate_of_zero_the_weight_still_moves_by_the_buffer():
    seen = after_a_step_at_zero(Momentum(0.5, "inside"))
    assert seen == [(-0.5, 0.5), (-0.75, 0.25), (-1.125, 0.375)]


def test_inside_corrected_at_a_rate_of_zero_the_buffer_is_reset():
    seen = after_a_step_at_zero(Momentum(0.5, "inside", momentum_correction=True))
    assert seen == [(-0.5, 0.5), (-0.5, 0.0), (-0.75, 0.25)]


@pytest.mark.parametrize("name", OURS)
def test_rates_of_zero_give_no_nan(name):
    moved = run_(OURS[name](parameters(), 0.0), [0.0, 0.0, 0.1, 0.0, 0.1])
    assert all(bool(p.isfinite().all()) for p in moved)


# --- against plain arithmetic ---


def norm(xs):
    return math.sqrt(sum(x * x for x in xs))


@pytest.mark.parametrize("ratio_decay", ["plain", "peak"])
def test_lars_equals_a_calculation_by_hand(ratio_decay):
    w, v = [3.0, -4.0], [0.0, 0.0]
    bias, bias_v = 2.0, 0.0
    eta, wd, eps, m, peak = 0.1, 0.05, 1e-3, 0.9, 4.0
    trust = TrustRatioOptions(eta, eps, ratio_decay, peak)
    weights = nn.Parameter(torch.tensor([w], dtype=torch.float64))
    offset = nn.Parameter(torch.tensor([bias], dtype=torch.float64))
    groups = [{"params": [weights]}, {"params": [offset], "adapt": False}]
    optimizer = LARS(groups, 1.0, trust=trust, weight_decay=wd)
    below = wd * (peak if ratio_decay == "peak" else 1)
    for lr, g, bias_g in [(1.0, [0.6, 0.8], 0.5), (2.0, [-0.3, 0.4], -0.25)]:
        ratio = eta * norm(w) / (norm(g) + below * norm(w) + eps)
        v = [m * a + lr * ratio * (b + wd * c) for a, b, c in zip(v, g, w, strict=True)]
        w = [a - b for a, b in zip(w, v, strict=True)]
        bias_v = m * bias_v + lr * bias_g
        bias -= bias_v
        weights.grad = torch.tensor([g], dtype=torch.float64)
        offset.grad = torch.tensor([bias_g], dtype=torch.float64)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    assert weights.tolist()[0] == pytest.approx(w, rel=1e-13)
    assert offset.tolist() == pytest.approx([bias], rel=1e-13)


@pytest.mark.parametrize("limit", [None, 2.0])
def test_lamb_equals_a_calculation_by_hand(limit):
    w, bias = [3.0, -4.0], 2.0
    first, second = [0.0] * 3, [0.0] * 3
    b1, b2, eps, wd, lr = 0.8, 0.9, 1e-2, 0.05, 0.1
    weights = nn.Parameter(torch.tensor([w], dtype=torch.float64))
    offset = nn.Parameter(torch.tensor([bias], dtype=torch.float64))
    groups = [{"params": [weights]}, {"params": [offset], "adapt": False}]
    moments = Moments(b1, b2, eps)
    optimizer = LAMB(groups, lr, moments=moments, weight_decay=wd, norm_limit=limit)
    for step, g in enumerate([[0.6, 0.8, 0.5], [-0.3, 0.4, -0.25]], 1):
        first = [b1 * a + (1 - b1) * b for a, b in zip(first, g, strict=True)]
        second = [b2 * a + (1 - b2) * b * b for a, b in zip(second, g, strict=True)]
        along = [
            a / (1 - b1**step) / (math.sqrt(b / (1 - b2**step)) + eps)
            for a, b in zip(first, second, strict=True)
        ]
        update = [a + wd * b for a, b in zip(along[:2], w, strict=True)]
        ratio = min(norm(w), limit or math.inf) / norm(update)
        w = [a - lr * ratio * b for a, b in zip(w, update, strict=True)]
        bias -= lr * along[2]
        weights.grad = torch.tensor([g[:2]], dtype=torch.float64)
        offset.grad = torch.tensor(g[2:], dtype=torch.float64)
        optimizer.step()
    assert weights.tolist()[0] == pytest.approx(w, rel=1e-13)
    assert offset.tolist() == pytest.approx([bias], rel=1e-13)


@pytest.mark.parametrize(
    "ratio", [lamb_ratio, lambda w, g: lars_ratio(w, g, TrustRatioOptions(), 0.1)]
)
def test_a_ratio_is_one_if_a_norm_is_zero_and_not_finite_if_a_norm_is_not(ratio):
    weight_norms = torch.tensor([[0.0, 2.0, 0.0, math.nan]])
    other_norms = torch.tensor([[3.0, 0.0, 0.0, 1.0]])
    assert ratio(weight_norms, other_norms)[0, :3].tolist() == [1.0, 1.0, 1.0]
    assert ratio(weight_norms, other_norms)[0, 3].isnan()


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_layer_that_starts_at_zero_leaves_it(name):
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.ones(2, 2)
    OURS[name]([weight], 0.1).step()
    assert float(weight.detach().abs().min()) > 0.01


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_scheduled_decay_is_applied_once(kind):
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = kind([weight], 1.0, weight_decay=0.1)
    for lr in SCHEDULE:
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    shrunk = math.prod(1 - lr * 0.1 for lr in SCHEDULE)
    assert weight.tolist() == pytest.approx([shrunk] * 3, rel=1e-14)


# --- many workers at once ---

WORKERS = 3


def steps_of(name, weights, memory, grads, lr):
    """Make one step of stacked workers with the bare update rules."""
    ones, twos = memory
    if name == "adamw":
        update_moments_(ones, twos, grads, Moments())
        decoupled_decay_(weights, lr, 0.01)
        steps = [memory_step(lr)] * len(weights)
        add_scaled_(weights, adam_directions(ones, twos, steps, Moments()), -lr)
        return
    directions = add_weight_decay(grads, weights, 0.01)
    if name == "lars":
        weight_norms, grad_norms = local_norms([*weights, *grads]).tensor_split(2, dim=1)
        scale_layers_(
            directions, lars_ratio(weight_norms, grad_norms, TrustRatioOptions(0.1), 0.01)
        )
    momentum = Momentum(0.9, "inside") if name == "lars" else Momentum(0.9)
    momentum_step_(weights, ones, directions, lr, momentum)


def memory_step(lr):
    return float(SCHEDULE.index(lr) + 1)


@pytest.mark.parametrize("name", ["sgd outside", "lars", "adamw"])
def test_stacked_workers_step_as_separate_ones_do(name):
    schedule = SCHEDULE[:4]  # no rate twice, since the step is looked up by its rate
    separate = [parameters(seed) for seed in range(WORKERS)]
    weights = [torch.stack([p.detach() for p in layer]) for layer in zip(*separate, strict=True)]
    memory = [[torch.zeros_like(w) for w in weights] for _ in range(2)]
    for step, lr in enumerate(schedule):
        grads = [torch.stack([g] * WORKERS) for g in gradients(step, separate[0])]
        steps_of(name, weights, memory, grads, lr)
    for worker, own in enumerate(separate):
        assert_close([w[worker] for w in weights], run_(OURS[name](own, 0.1), schedule))


def test_norms_of_stacked_layers_are_those_of_each_worker():
    layers = [torch.randn(WORKERS, *shape) for shape in SHAPES]
    separate = [local_norms([layer[w : w + 1] for layer in layers]) for w in range(WORKERS)]
    torch.testing.assert_close(local_norms(layers), torch.cat(separate))
    assert local_norms(layers).shape == (WORKERS, len(SHAPES))


# --- steps in parts, types, saved state ---


@pytest.mark.parametrize("name", OURS)
def test_stepping_in_parts_equals_stepping_at_once(name):
    whole, parts = parameters(), parameters()
    expected = run_(OURS[name](whole, 0.1), SCHEDULE)
    optimizer = OURS[name](parts, 0.1)
    for step, lr in enumerate(SCHEDULE):
        optimizer.param_groups[0]["lr"] = lr
        drawn = gradients(step, parts)
        for some in ([4, 1], [0, 3], [2], []):
            for index in some:
                parts[index].grad = drawn[index]
            optimizer.step()
            optimizer.zero_grad()
    assert_equal([p.detach() for p in parts], expected)


@pytest.mark.parametrize("name", OURS)
def test_gradients_and_parameters_without_one_are_not_changed(name):
    held = parameters()
    before = [p.detach().clone() for p in held]
    optimizer = OURS[name](held, 0.1)
    drawn = gradients(0, held)
    for index in (0, 2):
        held[index].grad = drawn[index].clone()
    optimizer.step()
    assert_equal([held[i] for i in (1, 3, 4)], [before[i] for i in (1, 3, 4)])
    assert_equal([held[i].grad for i in (0, 2)], [drawn[i] for i in (0, 2)])
    assert set(optimizer.state) == {held[0], held[2]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OURS)
def test_16_bit_parameters_are_the_rounded_ones_of_an_fp32_run(name, dtype):
    narrow = parameters(dtype=dtype)
    wide = [nn.Parameter(p.detach().float()) for p in narrow]
    small, large = OURS[name](narrow, 0.1), OURS[name](wide, 0.1)
    for step, lr in enumerate([1e-3] * 6):  # a single step is below the resolution of 16 bits
        for optimizer in (small, large):
            optimizer.param_groups[0]["lr"] = lr
        for p, q, g in zip(narrow, wide, gradients(step, narrow), strict=True):
            p.grad, q.grad = g, g.float()
        small.step()
        large.step()
    assert_equal([small.state[p]["master"] for p in narrow], [q.detach() for q in wide])
    assert_equal([p.detach() for p in narrow], [q.detach().to(dtype) for q in wide])


def test_a_change_of_a_16_bit_parameter_from_outside_reaches_its_master():
    weight = nn.Parameter(torch.full((4,), 3.0, dtype=torch.bfloat16))
    optimizer = SGD([weight], 1e-4)
    for expected in (3.0 - 1e-4, 7.0 - 2e-4):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert optimizer.state[weight]["master"].tolist() == pytest.approx([expected] * 4, abs=1e-6)
        with torch.no_grad():
            weight.fill_(7.0)


def saved_by_stretto(ours, restored, held, own):
    tensors, facts = flatten_optimizer(ours, {str(i): p for i, p in enumerate(held)})
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    restore_optimizer_(restored, {str(i): p for i, p in enumerate(own)}, tensors, facts)


def saved_by_torch(ours, restored, _held, _own):
    restored.load_state_dict(copy.deepcopy(ours.state_dict()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("save", [saved_by_stretto, saved_by_torch])
@pytest.mark.parametrize("name", OURS)
def test_resuming_from_saved_state_equals_an_uninterrupted_run(name, save, dtype):
    held = parameters(dtype=dtype)
    ours = OURS[name](held, 0.1)
    run_(ours, SCHEDULE[:3])
    own = [nn.Parameter(p.detach().clone()) for p in held]
    restored = OURS[name](own, 0.1)
    save(ours, restored, held, own)
    assert_equal(run_(restored, SCHEDULE[3:], first=3), run_(ours, SCHEDULE[3:], first=3))


@pytest.mark.parametrize("name", OURS)
def test_a_copy_of_an_optimizer_steps_as_it_does(name):
    ours = OURS[name](parameters(), 0.1)
    run_(ours, SCHEDULE[:2])
    twin = copy.deepcopy(ours)
    assert_equal(run_(twin, SCHEDULE[2:], 2), run_(ours, SCHEDULE[2:], 2))


@pytest.mark.parametrize("name", OURS)
def test_a_rate_may_be_a_tensor(name):
    rate = torch.tensor(0.1, dtype=torch.float64)
    held = parameters()
    optimizer = OURS[name](held, rate)
    schedule = [0.0, 0.1, 0.0, *SCHEDULE]
    for step, lr in enumerate(schedule):
        rate.fill_(lr)
        for p, g in zip(held, gradients(step, held), strict=True):
            p.grad = g
        optimizer.step()
    assert_close([p.detach() for p in held], run_(OURS[name](parameters(), 0.1), schedule))


@pytest.mark.parametrize("name", OURS)
def test_a_scheduler_of_torch_sets_the_rate(name):
    held = parameters()
    optimizer = OURS[name](held, 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: SCHEDULE[step] / 0.1)
    for step in range(4):
        for p, g in zip(held, gradients(step, held), strict=True):
            p.grad = g
        optimizer.step()
        scheduler.step()
    assert_close([p.detach() for p in held], run_(OURS[name](parameters(), 0.1), SCHEDULE[:4]))


@pytest.mark.parametrize("name", OURS)
def test_a_step_works_on_meta_tensors_so_its_memory_can_be_counted(name):
    held = [nn.Parameter(torch.empty(shape, device="meta")) for shape in SHAPES]
    for p in held:
        p.grad = torch.empty_like(p)
    OURS[name](held, 0.1).step()


# --- against other libraries, where they are installed ---


def test_lars_with_the_rate_outside_is_that_of_timm():
    timm = pytest.importorskip("timm.optim", reason="timm is not installed")
    ours, theirs = parameters(shapes=SHAPES[:2]), parameters(shapes=SHAPES[:2])
    outside = LARS(
        ours, 0.1, momentum=Momentum(0.9), trust=TrustRatioOptions(0.02), weight_decay=0.01
    )
    # Difference: timm also leaves out the ratio of groups without decay.
    peer = timm.Lars(theirs, lr=0.1, momentum=0.9, weight_decay=0.01, trust_coeff=0.02)
    assert_close(run_(outside, SCHEDULE), run_(peer, SCHEDULE))


def test_lars_with_the_rate_outside_is_that_of_torch_optimizer():
    peers = pytest.importorskip("torch_optimizer", reason="torch_optimizer is not installed")
    ours, theirs = parameters(shapes=SHAPES[:2]), parameters(shapes=SHAPES[:2])
    outside = LARS(
        ours, 0.1, momentum=Momentum(0.9), trust=TrustRatioOptions(0.02), weight_decay=0.01
    )
    # Differences: theirs also leaves out the ratio of groups without decay, leaves out the decay
    # if a norm is 0, and waits for every norm on the host.
    peer = peers.LARS(theirs, lr=0.1, momentum=0.9, weight_decay=0.01, trust_coefficient=0.02)
    assert_close(run_(outside, SCHEDULE), run_(peer, SCHEDULE))


def test_the_default_groups_change_what_decays():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = SGD(split_by_decay(model.parameters(), model), 0.5, weight_decay=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    shares = [0.75, 1.0, 1.0, 1.0]
    assert_equal(model.parameters(), [b * s for b, s in zip(before, shares, strict=True)])
