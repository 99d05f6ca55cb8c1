"""Plans on a GPU whose allocator may have no more than the budget: none must run out.

    python3 benchmarks/one_gpu.py --hosts 2 -- python3 -m benchmarks.budgets_gpu --pairs 20

Random GPTs and budgets, two NCCL ranks. Each model is profiled (units and their activations, on the
GPU), planned for a budget, and trained for a few steps under
`torch.cuda.set_per_process_memory_fraction` at that budget.
"""

import argparse
import copy
import gc
import json
import random
import sys

import torch

from benchmarks.budgets import drawn_budget
from stretto.cluster.detect import detect
from stretto.comm.channel import Channel
from stretto.comm.connect import connect
from stretto.measure.allocator import as_taken
from stretto.measure.profile import Sample, measure_units, other_bytes, slowest
from stretto.model import GPTConfig, build_model, per_sample_loss
from stretto.optim import SGDConfig, make_optimizer
from stretto.plan.options import Allowed
from stretto.plan.profile import Link, Profile
from stretto.plan.units import called_modules, find_units
from stretto.strategy.sharded.config import ShardedConfig
from stretto.strategy.sharded.known import Known
from stretto.strategy.sharded.strategy import Sharded

STEPS = 5


def main() -> int:
    """Try the pairs; say which ran out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    channel = connect(detect(), 120.0, device="cuda")
    failed = 0
    for seed in range(args.first, args.first + args.pairs):
        told = run_pair(seed, channel)
        failed += bool(told.get("wrong"))
        if channel.rank == 0:
            print(json.dumps({"seed": seed, **told}), flush=True)
    if channel.rank == 0:
        print(json.dumps({"pairs": args.pairs, "failed": failed}))
    channel.close()
    return 1 if failed else 0


def run_pair(seed: int, channel: Channel) -> dict[str, object]:
    """Profile, plan and train one model; return what was kept, and what went wrong."""
    torch.cuda.set_per_process_memory_fraction(1.0)
    draw = random.Random(seed)
    heads = draw.choice([4, 8])
    config = GPTConfig(
        vocab=draw.choice([1000, 8000]),
        context=128,
        width=64 * heads * draw.choice([1, 2]),
        blocks=draw.randint(2, 8),
        heads=heads,
        tied=draw.random() < 0.5,
        dropout=0.0,
    )
    model = build_model(config, 0).cuda()
    tokens = torch.randint(config.vocab, (draw.choice([2, 8]), 129), device="cuda")
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def loss(of: torch.nn.Module) -> torch.Tensor:
        return per_sample_loss(of(inputs), targets).mean()

    with torch.no_grad():
        calls = called_modules(model, lambda: loss(model))
    units = find_units(model, 100_000, calls)
    sample = Sample(lambda: loss(model), (tokens,))
    found = Profile(
        units=tuple(slowest(measure_units(model, units, sample, 3), channel)),
        link=Link(ranks=2, latency_s=1e-4, bytes_per_s=5e9, lanes=2),
        state_bytes=4,
        other_bytes=other_bytes(model, (tokens,)),
        unit_bytes=400_000,
    )
    profile = as_taken(found, "cuda")
    barrier = draw.random() < 0.3
    budget = drawn_budget(profile, Allowed(barrier=barrier), draw)
    own = copy.deepcopy(model).cpu()
    model.cpu()
    _empty()
    before = torch.cuda.memory_allocated()
    try:
        most = _train(
            own.cuda(),
            loss,
            ShardedConfig(memory=budget, unit=400_000),
            profile,
            calls,
            barrier,
            channel,
        )
    except torch.cuda.OutOfMemoryError as wrong:
        return {"wrong": str(wrong).splitlines()[0], "budget": budget}
    told: dict[str, object] = {"budget": budget, "most": most - before}
    if most - before > budget:
        told["over"] = round((most - before) / budget - 1, 4)
    return told


def _train(model, loss, config, profile, calls, barrier, channel) -> int:  # noqa: ANN001, PLR0913, PLR0917
    total = torch.cuda.get_device_properties(0).total_memory
    strategy = Sharded(config, channel)
    strategy.reads_gradients = barrier
    strategy.known = Known(calls, profile)
    model, optimizer = strategy.attach(
        model, make_optimizer(SGDConfig(lr=0.01, momentum=0.9), model)
    )
    _empty()
    torch.cuda.set_per_process_memory_fraction(min(1.0, config.memory / total))
    try:
        for step in range(STEPS):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            strategy.begin(step, 0, True, 0.01)
            (loss(model) / channel.size).backward()
            if not strategy.after_backward().done:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            strategy.after_update()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    strategy.settle()
    strategy.close()
    return most


def _empty() -> None:
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
