"""Training with any valid plan equals training on one rank."""

import copy
from functools import cache, partial

import pytest
import torch
from torch import nn

from stretto.checkpoint import flatten_optimizer, restore_optimizer_
from stretto.cluster.world import Mesh
from stretto.comm.in_process_transports import RecordingTransport, run_threads
from stretto.comm.transport import all_reduce_small_
from stretto.errors import StrettoError
from stretto.models import GPTConfig, build_model, per_sample_loss
from stretto.optim import AdamWConfig, LAMBConfig, LARSConfig, SGDConfig, make_optimizer
from stretto.planner.memory import compute_unit_memory, worst_case_curve, zero_latency_curve
from stretto.planner.plan import ElementBytes
from stretto.planner.presets import PLAN_PRESETS
from stretto.strategies import AllReduceConfig
from stretto.strategies.distribute import clip_norm_, consolidate, distribute
from stretto.strategies.sharded.config import ShardedConfig
from stretto.strategies.sharded.sharded import Sharded

pytestmark = pytest.mark.usefixtures("kept_solvers")

STEPS = 3
BATCH = 12


class UNet(nn.Module):
    """A U-Net: levels down and up with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 10)])
        self.across = nn.Sequential(nn.Linear(10, 10), nn.Tanh())
        self.up = nn.ModuleList([nn.Linear(20, 8), nn.Linear(16, 6)])
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        first = torch.tanh(self.down[0](x))
        second = torch.tanh(self.down[1](first))
        up = torch.tanh(self.up[0](torch.cat([self.across(second), second], -1)))
        return self.head(torch.tanh(self.up[1](torch.cat([up, first], -1))))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        return x + self.two(torch.relu(self.norm(self.one(x))))


class ResNet(nn.Module):
    """A stem, blocks with shortcuts and a head; group norms treat each sample separately."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.layers = nn.Sequential(nn.Sequential(Residual(), Residual()), Residual())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        images = x[:, :4].reshape(-1, 1, 2, 2)
        return self.head(self.layers(self.stem(images)).mean((2, 3)))


class Odd(nn.Module):
    """A frozen layer, a direct parameter, an unused parameter, and a layer that few samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(5))
        self.first = nn.Linear(6, 5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.rare = nn.Linear(5, 5)
        self.last = nn.Linear(5, 2)

    def forward(self, x):
        hidden = self.frozen(torch.tanh(self.first(x))) * self.scale
        if bool((x[:, 0] > 1.0).any()):
            hidden = hidden + torch.where((x[:, :1] > 1.0), self.rare(hidden), 0.0)
        return self.last(hidden)


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2))


def gpt():
    return build_model(
        GPTConfig(vocab=11, context=6, width=8, blocks=2, heads=2, tied=True, dropout=0.0), 0
    )


MODELS = {"mlp": mlp, "resnet": ResNet, "gpt": gpt, "unet": UNet, "odd": Odd}
OPTIMIZERS = {
    "sgd": SGDConfig(lr=0.1, momentum=0.9, weight_decay=0.01),
    "lars": LARSConfig(lr=0.5, momentum=0.9, weight_decay=0.01),
    "lamb": LAMBConfig(lr=0.02, weight_decay=0.01),
    "adamw": AdamWConfig(lr=0.02, weight_decay=0.01),
}


@cache
def initial(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name]().double()


@cache
def samples(name, device="cpu"):
    generator = torch.Generator().manual_seed(5)
    if name == "gpt":
        tokens = torch.randint(11, (STEPS, BATCH, 7), generator=generator).to(device)
        return tokens[..., :-1], tokens[..., 1:]
    x = torch.randn(STEPS, BATCH, 6, dtype=torch.float64, generator=generator).to(device)
    return x, (x[..., 0] * x[..., 1] > 0).long()


def loss_of(model, inputs, targets):
    return per_sample_loss(model(inputs), targets).sum()


@cache
def reference(name, optim, clip=None):
    """Return the losses and parameters of training on one rank."""
    model = copy.deepcopy(initial(name))
    optimizer = make_optimizer(OPTIMIZERS[optim], model)(model.parameters())
    losses = []
    for inputs, targets in zip(*samples(name), strict=True):
        loss = loss_of(model, inputs, targets) / BATCH
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


def run_plan(transport, name, optim, config, micros=1, clip=None, device="cpu"):
    """Train as the training loop does; return this rank's part of the losses, whole parameters."""
    strategy = Sharded(config, transport)
    strategy.reads_gradients = clip is not None
    model = copy.deepcopy(initial(name)).to(device)
    model, optimizer = strategy.attach(model, make_optimizer(OPTIMIZERS[optim], model))
    losses = []
    for step, (inputs, targets) in enumerate(zip(*samples(name, device), strict=True)):
        own_samples = slice(
            transport.rank * BATCH // transport.size, (transport.rank + 1) * BATCH // transport.size
        )
        micro_batches = list(
            zip(
                inputs[own_samples].tensor_split(micros),
                targets[own_samples].tensor_split(micros),
                strict=True,
            )
        )
        total = 0.0
        for micro, (some, answers) in enumerate(micro_batches):
            strategy.begin(step, micro, micro == micros - 1, 0.0)
            if len(some):
                loss = loss_of(model, some, answers) / BATCH
                total += float(loss.detach())
                loss.backward()
        step_gradients = strategy.after_backward()
        if clip:
            step_gradients.clip_(clip)
        if not step_gradients.is_applied:
            optimizer.step()
        strategy.after_update()
        # The training loop also all-reduces when it logs, while other messages are in progress.
        ranks = torch.ones(1, dtype=torch.float64)
        all_reduce_small_(ranks, transport)
        assert float(ranks) == transport.size
        losses.append(total)
    strategy.consolidate()
    parameters = {n: p.detach().to("cpu", copy=True) for n, p in model.named_parameters()}
    strategy.close()
    return losses, parameters


def compare(results, expected):
    losses, parameters = expected
    summed = [sum(step) for step in zip(*(r[0] for r in results), strict=True)]
    assert summed == pytest.approx(losses, abs=1e-10)
    for _, trained in results:
        for name, value in parameters.items():
            torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("plan", PLAN_PRESETS)
@pytest.mark.parametrize("name", MODELS)
def test_a_preset_trains_as_one_rank(name, plan, ranks):
    config = ShardedConfig(plan=plan, unit=0)
    expected = reference(name, "sgd")  # first: threads share the generator
    results = run_threads(ranks, lambda transport: run_plan(transport, name, "sgd", config))
    compare(results, expected)


@pytest.mark.parametrize("seed", range(20))
def test_a_random_plan_trains_as_one_rank(seed):
    name = [*MODELS][seed % len(MODELS)]
    optim = [*OPTIMIZERS][seed // len(MODELS) % len(OPTIMIZERS)]
    config = ShardedConfig(plan=f"random {seed}", unit=0)
    micros, ranks = 1 + seed % 3, 1 + seed % 4
    expected = reference(name, optim)
    results = run_threads(ranks, lambda transport: run_plan(transport, name, optim, config, micros))
    compare(results, expected)


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3"])
def test_units_sharded_inside_hosts_train_as_one_rank(plan, optim):
    expected = reference("gpt", optim)
    config = ShardedConfig(plan=plan, unit=0, in_host=True)
    results = run_threads(Mesh((2, 2)), lambda transport: run_plan(transport, "gpt", optim, config))
    compare(results, expected)


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("plan", ["zero2", "random 3"])
def test_gradients_are_clipped_as_on_one_rank(plan, optim):
    expected = reference("odd", optim, clip=0.05)
    config = ShardedConfig(plan=plan, unit=0)
    results = run_threads(
        3, lambda transport: run_plan(transport, "odd", optim, config, 2, clip=0.05)
    )
    compare(results, expected)


def holdings_of(strategy, state):
    """Return the predicted memory of this rank for each unit."""
    element_bytes = ElementBytes(parameter=8, gradient=8, kept=8, state=state)
    return [
        compute_unit_memory(
            planned,
            held.sharded.layout,
            element_bytes,
            held.sharded.rank,
            strategy.plan.barrier,
        )
        for planned, held in zip(strategy.plan.units, strategy.inspect().units, strict=True)
    ]


def peaks_of(config, *, inline, reads):
    """Train a GPT on 3 ranks; return the measured peaks of a steady cycle and both predictions."""

    def work(transport):
        strategy = Sharded(config, RecordingTransport(transport))
        strategy.inline, strategy.reads_gradients = inline, reads
        model = copy.deepcopy(initial("gpt"))
        model, optimizer = strategy.attach(model, make_optimizer(OPTIMIZERS["sgd"], model))
        inputs, targets = samples("gpt")
        for step in range(4):
            if step == 3:
                strategy.memory_tracker.reset_peaks()
            strategy.begin(step, 0, True, 0.0)
            loss_of(model, inputs[0], targets[0]).backward()
            if not strategy.after_backward().is_applied:
                optimizer.step()
            strategy.after_update()
        # A cycle starts with backward and ends with the forward of the next step.
        strategy.begin(4, 0, True, 0.0)
        loss_of(model, inputs[0], targets[0])
        peaks = list(strategy.memory_tracker.peaks)
        held = holdings_of(strategy, state=8)
        predicted = zero_latency_curve(strategy.plan, held), worst_case_curve(strategy.plan, held)
        strategy.close()
        return peaks, *predicted

    return run_threads(3, work)


PLANS = [*PLAN_PRESETS, *(f"random {seed}" for seed in range(8))]


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_the_memory_tracker_equals_the_prediction_if_messages_take_no_time(plan, reads):
    initial("gpt")
    for peaks, logical, _ in peaks_of(ShardedConfig(plan=plan, unit=0), inline=True, reads=reads):
        assert peaks == logical


@pytest.mark.parametrize("plan", PLANS)
def test_the_memory_tracker_never_exceeds_the_predicted_worst_case(plan):
    initial("gpt")
    for peaks, _, worst in peaks_of(ShardedConfig(plan=plan, unit=0), inline=False, reads=False):
        assert all(peak <= most for peak, most in zip(peaks, worst, strict=True))


KEPT = ["ddp", "zero1", "zero2", "zero3"]


def two_steps_and_one(transport, plan, saved=None):
    """Train two steps, or restore ``saved``; return the state, and the loss of the next step."""
    strategy = Sharded(ShardedConfig(plan=plan, unit=0), transport)
    model = copy.deepcopy(initial("unet"))
    model, _ = strategy.attach(model, make_optimizer(OPTIMIZERS["adamw"], model))
    named = dict(model.named_parameters())
    inputs, targets = samples("unet")
    own_samples = slice(
        transport.rank * BATCH // transport.size, (transport.rank + 1) * BATCH // transport.size
    )

    def step(index):
        strategy.begin(index, 0, True, 0.0)
        loss = loss_of(model, inputs[index][own_samples], targets[index][own_samples]) / BATCH
        loss.backward()
        strategy.after_backward()
        strategy.after_update()
        return float(loss.detach())

    if saved is None:
        step(0)
        step(1)
        strategy.consolidate()
        tensors, facts = flatten_optimizer(strategy.full_optimizer_state(), named)
        state = {n: t.clone() for n, t in model.state_dict().items()}, tensors, facts
    else:
        state = saved
        model.load_state_dict(saved[0])
        whole = strategy.full_optimizer_state()
        restore_optimizer_(whole, named, saved[1], saved[2])
        strategy.load_full_optimizer_state(whole)
    loss = step(2)
    strategy.close()
    return state, loss


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("plan", KEPT)
def test_another_plan_resumes_a_saved_state_at_any_number_of_ranks(plan, ranks):
    initial("unet")
    first = run_threads(ranks, lambda transport: two_steps_and_one(transport, plan))
    saved, expected = first[0][0], sum(loss for _, loss in first)
    for index, other in enumerate(KEPT):
        size = 1 + (ranks + index) % 4
        after = run_threads(size, partial(two_steps_and_one, plan=other, saved=saved))
        assert sum(loss for _, loss in after) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("config", [AllReduceConfig(), ShardedConfig(plan="zero3", unit=0)])
def test_in_an_ordinary_loop_gradients_are_clipped_as_on_one_rank(config):
    expected = reference("unet", "sgd", clip=0.05)

    def work(transport):
        model = copy.deepcopy(initial("unet"))
        making = make_optimizer(OPTIMIZERS["sgd"], model)
        model, optimizer = distribute(model, making, config, transport=transport)
        own_samples = slice(0, 5) if transport.rank == 0 else slice(5, BATCH)
        for inputs, targets in zip(*samples("unet"), strict=True):
            with pytest.raises(StrettoError, match="between the step's last backward"):
                clip_norm_(model, 0.05)
            per_sample_loss(model(inputs[own_samples]), targets[own_samples]).mean().backward()
            assert clip_norm_(model, 0.05) > 0.05
            optimizer.step()
            optimizer.zero_grad()
        consolidate(model)
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    for parameters in run_threads(2, work):
        for name, value in expected[1].items():
            torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-10, msg=name)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the framework's compiler
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("plan", ["zero1", "zero3", "random 12"])
def test_in_an_ordinary_loop_it_trains_as_one_rank(plan, compiled):
    """Batches of unequal size, evaluation between steps; units compiled by the framework."""
    expected = reference("gpt", "adamw")

    def work(transport):
        model = copy.deepcopy(initial("gpt"))
        making = make_optimizer(OPTIMIZERS["adamw"], model)
        config = ShardedConfig(plan=plan, unit=0)
        model, optimizer = distribute(model, making, config, transport=transport)
        for block in model.blocks if compiled else ():
            block.compile(backend="aot_eager")
        own_samples = slice(0, 3) if transport.rank == 0 else slice(3, BATCH)
        for inputs, targets in zip(*samples("gpt"), strict=True):
            per_sample_loss(model(inputs[own_samples]), targets[own_samples]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            consolidate(model)
            with torch.no_grad():
                model(inputs)
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    for parameters in run_threads(2, work):
        for name, value in expected[1].items():
            torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-10, msg=name)
