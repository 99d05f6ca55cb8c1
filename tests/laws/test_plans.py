"""Any valid plan computes what one rank computes: whatever is cut up, and whenever it travels."""

import copy
from functools import cache, partial

import pytest
import torch
from torch import nn

from stretto.checkpoint import flatten_optimizer, restore_optimizer_
from stretto.cluster.world import Mesh
from stretto.comm.local import run_local
from stretto.comm.recording import RecordingChannel
from stretto.comm.small import add_up_
from stretto.errors import StrettoError
from stretto.model import GPTConfig, build_model
from stretto.model.loss import per_sample_loss
from stretto.optim import AdamWConfig, LAMBConfig, LARSConfig, SGDConfig, make_optimizer
from stretto.plan.memory import Widths, holding, logical_curve, worst_curve
from stretto.plan.presets import PRESETS
from stretto.strategy import AllReduceConfig
from stretto.strategy.distribute import clip_norm_, distribute, settle
from stretto.strategy.sharded.config import ShardedConfig
from stretto.strategy.sharded.strategy import Sharded

STEPS = 3
BATCH = 12


class UNet(nn.Module):
    """Down, across, up, with skips from each level down to the one up."""

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
    """A stem, blocks with shortcuts, a head; norms that see each sample by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.layers = nn.Sequential(nn.Sequential(Residual(), Residual()), Residual())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        images = x[:, :4].reshape(-1, 1, 2, 2)
        return self.head(self.layers(self.stem(images)).mean((2, 3)))


class Odd(nn.Module):
    """A frozen layer, a layer used twice, a parameter nobody uses, one that few samples use."""

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
    """Return the losses and parameters of one rank that does it all."""
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


def run_plan(channel, name, optim, config, micros=1, clip=None, device="cpu"):
    """Train as the loop does; return this rank's shares of the losses, and whole parameters."""
    strategy = Sharded(config, channel)
    strategy.reads_gradients = clip is not None
    model = copy.deepcopy(initial(name)).to(device)
    model, optimizer = strategy.attach(model, make_optimizer(OPTIMIZERS[optim], model))
    losses = []
    for step, (inputs, targets) in enumerate(zip(*samples(name, device), strict=True)):
        mine = slice(
            channel.rank * BATCH // channel.size, (channel.rank + 1) * BATCH // channel.size
        )
        pieces = list(
            zip(inputs[mine].tensor_split(micros), targets[mine].tensor_split(micros), strict=True)
        )
        total = 0.0
        for micro, (some, answers) in enumerate(pieces):
            strategy.begin(step, micro, micro == micros - 1, 0.0)
            if len(some):
                loss = loss_of(model, some, answers) / BATCH
                total += float(loss.detach())
                loss.backward()
        agreed = strategy.after_backward()
        if clip:
            agreed.clip_(clip)
        if not agreed.done:
            optimizer.step()
        strategy.after_update()
        # As the loop does when it logs: a sum of its own beside whatever is still under way.
        ranks = torch.ones(1, dtype=torch.float64)
        add_up_(ranks, channel)
        assert float(ranks) == channel.size
        losses.append(total)
    strategy.settle()
    parameters = {n: p.detach().to("cpu", copy=True) for n, p in model.named_parameters()}
    strategy.close()
    return losses, parameters


def compare(results, expected):
    losses, parameters = expected
    summed = [sum(step) for step in zip(*(r[0] for r in results), strict=True)]
    assert summed == pytest.approx(losses, abs=1e-10)
    for _, mine in results:
        for name, value in parameters.items():
            torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("plan", PRESETS)
@pytest.mark.parametrize("name", MODELS)
def test_a_preset_trains_as_one_rank(name, plan, ranks):
    config = ShardedConfig(plan=plan, unit=0)
    expected = reference(name, "sgd")  # first: threads share the generator
    results = run_local(ranks, lambda channel: run_plan(channel, name, "sgd", config))
    compare(results, expected)


@pytest.mark.parametrize("seed", range(20))
def test_a_random_plan_trains_as_one_rank(seed):
    name = [*MODELS][seed % len(MODELS)]
    optim = [*OPTIMIZERS][seed // len(MODELS) % len(OPTIMIZERS)]
    config = ShardedConfig(plan=f"random {seed}", unit=0)
    micros, ranks = 1 + seed % 3, 1 + seed % 4
    expected = reference(name, optim)
    results = run_local(ranks, lambda channel: run_plan(channel, name, optim, config, micros))
    compare(results, expected)


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3"])
def test_units_shared_out_in_each_host_train_as_one_rank(plan, optim):
    expected = reference("gpt", optim)
    config = ShardedConfig(plan=plan, unit=0, in_host=True)
    results = run_local(Mesh((2, 2)), lambda channel: run_plan(channel, "gpt", optim, config))
    compare(results, expected)


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("plan", ["zero2", "random 3"])
def test_gradients_that_somebody_reads_are_clipped_as_on_one_rank(plan, optim):
    expected = reference("odd", optim, clip=0.05)
    config = ShardedConfig(plan=plan, unit=0)
    results = run_local(3, lambda channel: run_plan(channel, "odd", optim, config, 2, clip=0.05))
    compare(results, expected)


def holdings_of(strategy, state):
    """Return what the plan says that this rank keeps for each unit."""
    widths = Widths(parameter=8, gradient=8, kept=8, state=state)
    return [
        holding(planned, held.storage.layout, widths, held.storage.rank, strategy.plan.barrier)
        for planned, held in zip(strategy.plan.units, strategy._cut.units, strict=True)
    ]


def peaks_of(config, *, inline, reads):
    """Train a GPT on 3 ranks; return the ledger's peaks of steady steps, and what was predicted."""

    def work(channel):
        strategy = Sharded(config, RecordingChannel(channel))
        strategy.inline, strategy.reads_gradients = inline, reads
        model = copy.deepcopy(initial("gpt"))
        model, optimizer = strategy.attach(model, make_optimizer(OPTIMIZERS["sgd"], model))
        inputs, targets = samples("gpt")
        for step in range(4):
            if step == 3:
                strategy.ledger.forget()
            strategy.begin(step, 0, True, 0.0)
            loss_of(model, inputs[0], targets[0]).backward()
            if not strategy.after_backward().done:
                optimizer.step()
            strategy.after_update()
        # The cycle that began with the last backward ends with a forward.
        strategy.begin(4, 0, True, 0.0)
        loss_of(model, inputs[0], targets[0])
        peaks = list(strategy.ledger.peaks)
        held = holdings_of(strategy, state=8)
        predicted = logical_curve(strategy.plan, held), worst_curve(strategy.plan, held)
        strategy.close()
        return peaks, *predicted

    return run_local(3, work)


PLANS = [*PRESETS, *(f"random {seed}" for seed in range(8))]


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_the_ledger_is_what_was_predicted_when_messages_take_no_time(plan, reads):
    initial("gpt")
    for peaks, logical, _ in peaks_of(ShardedConfig(plan=plan, unit=0), inline=True, reads=reads):
        assert peaks == logical


@pytest.mark.parametrize("plan", PLANS)
def test_the_ledger_is_never_above_the_worst_that_was_predicted(plan):
    initial("gpt")
    for peaks, _, worst in peaks_of(ShardedConfig(plan=plan, unit=0), inline=False, reads=False):
        assert all(peak <= most for peak, most in zip(peaks, worst, strict=True))


KEPT = ["ddp", "zero1", "zero2", "zero3"]


def two_steps_and_one(channel, plan, saved=None):
    """Train two steps, or take up what was saved; return the state, and the next step's loss."""
    strategy = Sharded(ShardedConfig(plan=plan, unit=0), channel)
    model = copy.deepcopy(initial("unet"))
    model, _ = strategy.attach(model, make_optimizer(OPTIMIZERS["adamw"], model))
    named = dict(model.named_parameters())
    inputs, targets = samples("unet")
    mine = slice(channel.rank * BATCH // channel.size, (channel.rank + 1) * BATCH // channel.size)

    def step(index):
        strategy.begin(index, 0, True, 0.0)
        loss = loss_of(model, inputs[index][mine], targets[index][mine]) / BATCH
        loss.backward()
        strategy.after_backward()
        strategy.after_update()
        return float(loss.detach())

    if saved is None:
        step(0)
        step(1)
        strategy.settle()
        tensors, facts = flatten_optimizer(strategy.whole_optimizer(), named)
        state = {n: t.clone() for n, t in model.state_dict().items()}, tensors, facts
    else:
        state = saved
        model.load_state_dict(saved[0])
        whole = strategy.whole_optimizer()
        restore_optimizer_(whole, named, saved[1], saved[2])
        strategy.take_optimizer(whole)
    loss = step(2)
    strategy.close()
    return state, loss


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("plan", KEPT)
def test_what_one_plan_saves_another_takes_up_at_any_number_of_ranks(plan, ranks):
    initial("unet")
    first = run_local(ranks, lambda channel: two_steps_and_one(channel, plan))
    saved, expected = first[0][0], sum(loss for _, loss in first)
    for index, other in enumerate(KEPT):
        size = 1 + (ranks + index) % 4
        after = run_local(size, partial(two_steps_and_one, plan=other, saved=saved))
        assert sum(loss for _, loss in after) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("config", [AllReduceConfig(), ShardedConfig(plan="zero3", unit=0)])
def test_in_an_ordinary_loop_gradients_are_clipped_as_on_one_rank(config):
    expected = reference("unet", "sgd", clip=0.05)

    def work(channel):
        model = copy.deepcopy(initial("unet"))
        making = make_optimizer(OPTIMIZERS["sgd"], model)
        model, optimizer = distribute(model, making, config, channel=channel)
        mine = slice(0, 5) if channel.rank == 0 else slice(5, BATCH)
        for inputs, targets in zip(*samples("unet"), strict=True):
            with pytest.raises(StrettoError, match="between the step's last backward"):
                clip_norm_(model, 0.05)
            per_sample_loss(model(inputs[mine]), targets[mine]).mean().backward()
            assert clip_norm_(model, 0.05) > 0.05
            optimizer.step()
            optimizer.zero_grad()
        settle(model)
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    for parameters in run_local(2, work):
        for name, value in expected[1].items():
            torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-10, msg=name)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the framework's compiler
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("plan", ["zero1", "zero3", "random 12"])
def test_in_an_ordinary_loop_it_trains_as_one_rank(plan, compiled):
    """Batches of unequal size, evaluation between steps; units compiled by the framework."""
    expected = reference("gpt", "adamw")

    def work(channel):
        model = copy.deepcopy(initial("gpt"))
        making = make_optimizer(OPTIMIZERS["adamw"], model)
        config = ShardedConfig(plan=plan, unit=0)
        model, optimizer = distribute(model, making, config, channel=channel)
        for block in model.blocks if compiled else ():
            block.compile(backend="aot_eager")
        mine = slice(0, 3) if channel.rank == 0 else slice(3, BATCH)
        for inputs, targets in zip(*samples("gpt"), strict=True):
            per_sample_loss(model(inputs[mine]), targets[mine]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            settle(model)
            with torch.no_grad():
                model(inputs)
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    for parameters in run_local(2, work):
        for name, value in expected[1].items():
            torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-10, msg=name)
