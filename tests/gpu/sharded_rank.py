"""One of several NCCL ranks: sharded plans against one rank on the CPU, and their memory."""

import copy
import gc
import sys

import torch

from stretto.cluster.detect import detect
from stretto.comm.connect import connect
from stretto.model import GPTConfig, build_model
from stretto.model.loss import per_sample_loss
from stretto.optim import SGDConfig, make_optimizer
from stretto.plan.memory import Widths, holding, worst_curve
from stretto.plan.presets import PRESETS
from stretto.strategy.sharded.config import ShardedConfig
from stretto.strategy.sharded.strategy import Sharded
from tests.laws.test_plans import MODELS, OPTIMIZERS, reference, run_plan

SEEDS = 30


def check_plans(channel):
    """Every preset and many random plans, on every model, with every optimizer."""
    plans = [*PRESETS, *(f"random {seed}" for seed in range(SEEDS))]
    for index, plan in enumerate(plans):
        name = [*MODELS][index % len(MODELS)]
        optim = [*OPTIMIZERS][index // len(MODELS) % len(OPTIMIZERS)]
        clip, micros = (0.05 if index % 5 == 4 else None), 1 + index % 3
        losses, parameters = reference(name, optim, clip)
        config = ShardedConfig(plan=plan, unit=0)
        mine, whole = run_plan(channel, name, optim, config, micros, clip, "cuda")
        total = torch.tensor(mine, dtype=torch.float64)
        channel.start_all_reduce(total).wait()
        assert torch.allclose(total, torch.tensor(losses, dtype=torch.float64), atol=1e-9), plan
        for parameter, value in parameters.items():
            assert torch.allclose(whole[parameter], value, rtol=0, atol=1e-9), (plan, parameter)


def check_allocator(channel, plan):
    """The allocator's peak, activations apart, is what the plan says within 5 %."""
    config = GPTConfig(vocab=512, context=16, width=1024, blocks=8, heads=8)
    model = build_model(config, 0)
    tokens = torch.randint(512, (1, 17), device="cuda")
    beside = activations(model, tokens)  # first: libraries keep the room in which they work
    before = clean()
    # Whatever waits for nobody is known to the slot.
    strategy = Sharded(ShardedConfig(plan=plan, pending=0, prefetch=2), channel)
    own = copy.deepcopy(model).to("cuda")
    own, _ = strategy.attach(own, make_optimizer(SGDConfig(lr=0.1, momentum=0.9), own))
    for step in range(4):
        strategy.begin(step, 0, True, 0.1)
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
            strategy.ledger.forget()
        loss = per_sample_loss(own(tokens[:, :-1]), tokens[:, 1:]).sum()
        loss.backward()
        del loss
        strategy.after_backward()
        strategy.after_update()
    peak = torch.cuda.max_memory_allocated() - before
    held = [
        holding(unit, h.storage.layout, Widths(4, 4, 4, 4), h.storage.rank, barrier=False)
        for unit, h in zip(strategy.plan.units, strategy._cut.units, strict=True)
    ]
    predicted = max(worst_curve(strategy.plan, held))
    kept = max(strategy.ledger.peaks)
    strategy.settle()
    strategy.close()
    ratio = (peak - beside) / predicted
    if channel.rank == 0:
        print(
            f"{plan}: allocator {peak / 1e6:.1f} MB, of it activations {beside / 1e6:.1f}; "
            f"ledger {kept / 1e6:.1f}, predicted at most {predicted / 1e6:.1f}; {ratio:.3f}",
            flush=True,
        )
    assert kept <= predicted, plan
    assert abs(ratio - 1) <= 0.05, (plan, ratio)


def activations(model, tokens):
    """Return what forward and backward keep beside parameters and gradients, on one rank."""
    own = copy.deepcopy(model).to("cuda")
    for parameter in own.parameters():  # gradients that go at once: what is left is activations
        parameter.register_post_accumulate_grad_hook(drop)
    for _ in range(2):
        state = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        per_sample_loss(own(tokens[:, :-1]), tokens[:, 1:]).sum().backward()
    return torch.cuda.max_memory_allocated() - state


def drop(parameter):
    parameter.grad = None


def clean():
    """Give back what nobody holds; return what is held."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def main() -> None:
    """Run the checks that are named."""
    torch.cuda.set_device(0)
    channel = connect(detect(), 60.0, device="cuda")
    for name in sys.argv[1:]:
        check, *what = name.split(":")
        globals()[check](channel, *what)
        if channel.rank == 0:
            print(f"{name} held", flush=True)
    channel.close()


if __name__ == "__main__":
    main()
