"""The program of one NCCL rank of `test_sharded.py`: sharded plans, and their memory."""

import copy
import gc
import sys

import torch

from stretto.cluster.detect import detect_world
from stretto.comm.connect import connect
from stretto.models import GPTConfig, build_model, per_sample_loss
from stretto.optim import SGDConfig, make_optimizer
from stretto.planner.memory import compute_unit_memory, worst_case_curve
from stretto.planner.plan import ElementBytes
from stretto.planner.presets import PLAN_PRESETS
from stretto.strategies.sharded.config import ShardedConfig
from stretto.strategies.sharded.sharded import Sharded
from tests.laws.test_plans import MODELS, OPTIMIZERS, reference, run_plan

SEEDS = 30


def check_plans(transport):
    """Check that presets and random plans train as one rank on the CPU does."""
    plans = [*PLAN_PRESETS, *(f"random {seed}" for seed in range(SEEDS))]
    for index, plan in enumerate(plans):
        name = [*MODELS][index % len(MODELS)]
        optim = [*OPTIMIZERS][index // len(MODELS) % len(OPTIMIZERS)]
        clip, micros = (0.05 if index % 5 == 4 else None), 1 + index % 3
        losses, parameters = reference(name, optim, clip)
        config = ShardedConfig(plan=plan, unit=0)
        losses_here, whole = run_plan(transport, name, optim, config, micros, clip, "cuda")
        total = torch.tensor(losses_here, dtype=torch.float64)
        transport.start_all_reduce(total).wait()
        assert torch.allclose(total, torch.tensor(losses, dtype=torch.float64), atol=1e-9), plan
        for parameter, value in parameters.items():
            assert torch.allclose(whole[parameter], value, rtol=0, atol=1e-9), (plan, parameter)


def check_allocator(transport, plan):
    """Check that the allocator's peak without activations is within 5 % of the plan's."""
    config = GPTConfig(vocab=512, context=16, width=1024, blocks=8, heads=8)
    model = build_model(config, 0)
    tokens = torch.randint(512, (1, 17), device="cuda")
    activation_bytes = activations(model, tokens)  # first: libraries keep their workspaces
    before = clean()
    # Without pending messages, the memory at each slot is exactly predictable.
    strategy = Sharded(ShardedConfig(plan=plan, reduce_slots=0, prefetch=2), transport)
    copied = copy.deepcopy(model).to("cuda")
    copied, _ = strategy.attach(copied, make_optimizer(SGDConfig(lr=0.1, momentum=0.9), copied))
    for step in range(4):
        strategy.begin(step, 0, True, 0.1)
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
            strategy.memory_tracker.reset_peaks()
        loss = per_sample_loss(copied(tokens[:, :-1]), tokens[:, 1:]).sum()
        loss.backward()
        del loss
        strategy.after_backward()
        strategy.after_update()
    peak = torch.cuda.max_memory_allocated() - before
    held = [
        compute_unit_memory(
            unit,
            h.sharded.layout,
            ElementBytes(4, 4, 4, 4),
            h.sharded.rank,
            barrier=False,
        )
        for unit, h in zip(strategy.plan.units, strategy.inspect().units, strict=True)
    ]
    predicted = max(worst_case_curve(strategy.plan, held))
    kept = max(strategy.memory_tracker.peaks)
    strategy.consolidate()
    strategy.close()
    ratio = (peak - activation_bytes) / predicted
    if transport.rank == 0:
        print(
            f"{plan}: allocator {peak / 1e6:.1f} MB, of it activations "
            f"{activation_bytes / 1e6:.1f}; tracker {kept / 1e6:.1f}, "
            f"predicted at most {predicted / 1e6:.1f}; {ratio:.3f}",
            flush=True,
        )
    assert kept <= predicted, plan
    assert abs(ratio - 1) <= 0.05, (plan, ratio)


def activations(model, tokens):
    """Return the peak memory of activations in forward and backward, in bytes, on one rank."""
    copied = copy.deepcopy(model).to("cuda")
    for parameter in copied.parameters():  # free gradients at once: only activations remain
        parameter.register_post_accumulate_grad_hook(drop)
    for _ in range(2):
        state = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        per_sample_loss(copied(tokens[:, :-1]), tokens[:, 1:]).sum().backward()
    return torch.cuda.max_memory_allocated() - state


def drop(parameter):
    parameter.grad = None


def clean():
    """Free unused memory; return the allocated bytes."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def main() -> None:
    """Run the checks named on the command line."""
    torch.cuda.set_device(0)
    transport = connect(detect_world(), 60.0, device="cuda")
    for name in sys.argv[1:]:
        check, *what = name.split(":")
        globals()[check](transport, *what)
        if transport.rank == 0:
            print(f"{name} held", flush=True)
    transport.close()


if __name__ == "__main__":
    main()
