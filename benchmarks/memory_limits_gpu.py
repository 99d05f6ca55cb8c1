"""Check on a GPU that no plan runs out of memory when the allocator is capped at its limit.

    python3 benchmarks/one_gpu.py --hosts 2 -- python3 -m benchmarks.memory_limits_gpu --pairs 20

Uses random GPTs and memory limits, on two NCCL ranks. Each model is profiled on the GPU (the units
and their activations) and planned for a limit. It then trains for a few steps while
`torch.cuda.set_per_process_memory_fraction` caps the allocator at that limit. Prints a JSON object
per pair, then the count; the exit status is 1 if a pair ran out of memory.
"""

import argparse
import copy
import gc
import json
import random
import sys

import torch

from benchmarks.memory_limits import drawn_memory_limit
from stretto.cluster.detect import detect_world
from stretto.comm.connect import connect
from stretto.comm.transport import Transport
from stretto.models import GPTConfig, build_model, per_sample_loss
from stretto.optim import SGDConfig, make_optimizer
from stretto.planner.model_units import called_modules, find_units
from stretto.planner.profile import Link, Profile
from stretto.planner.unit_choices import PlanConstraints
from stretto.profiler.measure_units import SampleStep, max_over_ranks, measure_units, other_bytes
from stretto.profiler.meters import add_allocator_overhead
from stretto.renamed import with_old_keys
from stretto.strategies.sharded.assembly import ModelInfo
from stretto.strategies.sharded.config import ShardedConfig
from stretto.strategies.sharded.sharded import Sharded

STEPS = 5


def main() -> int:
    """Check the pairs and print each result; return 1 if one ran out of memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    transport = connect(detect_world(), 120.0, device="cuda")
    failed = 0
    for seed in range(args.first, args.first + args.pairs):
        result = run_pair(seed, transport)
        failed += bool(result.get("wrong"))
        if transport.rank == 0:
            print(json.dumps(with_old_keys({"seed": seed, **result})), flush=True)
    if transport.rank == 0:
        print(json.dumps({"pairs": args.pairs, "failed": failed}))
    transport.close()
    return 1 if failed else 0


def run_pair(seed: int, transport: Transport) -> dict[str, object]:
    """Profile, plan and train one model; return the limit, the peak and any error."""
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
    sample = SampleStep(lambda: loss(model), (tokens,))
    found = Profile(
        units=tuple(max_over_ranks(measure_units(model, units, sample, 3), transport)),
        link=Link(ranks=2, latency_s=1e-4, bytes_per_s=5e9, lanes=2),
        state_bytes=4,
        other_bytes=other_bytes(model, (tokens,)),
        unit_bytes=400_000,
    )
    profile = add_allocator_overhead(found, "cuda")
    barrier = draw.random() < 0.3
    memory_limit = drawn_memory_limit(profile, PlanConstraints(barrier=barrier), draw)
    trained = copy.deepcopy(model).cpu()
    model.cpu()
    _empty()
    before = torch.cuda.memory_allocated()
    try:
        most = _train(
            trained.cuda(),
            loss,
            ShardedConfig(memory=memory_limit, unit=400_000),
            profile,
            calls,
            barrier,
            transport,
        )
    except torch.cuda.OutOfMemoryError as wrong:
        return {"wrong": str(wrong).splitlines()[0], "memory_limit": memory_limit}
    result: dict[str, object] = {"memory_limit": memory_limit, "most": most - before}
    if most - before > memory_limit:
        result["over"] = round((most - before) / memory_limit - 1, 4)
    return result


def _train(model, loss, config, profile, calls, barrier, transport) -> int:  # noqa: ANN001, PLR0913, PLR0917
    total = torch.cuda.get_device_properties(0).total_memory
    strategy = Sharded(config, transport)
    strategy.reads_gradients = barrier
    strategy.model_info = ModelInfo(calls, profile)
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
            (loss(model) / transport.size).backward()
            if not strategy.after_backward().is_applied:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            strategy.after_update()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    strategy.consolidate()
    strategy.close()
    return most


def _empty() -> None:
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
