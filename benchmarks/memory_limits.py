"""Check that no plan exceeds its memory limit, on random pairs of a model and a limit.

    python -m benchmarks.memory_limits [--pairs 500] [--first 0]     simulated
    python -m benchmarks.memory_limits --execute 50                  on two ranks, two processes

A simulated pair passes if three things hold. The peak of the plan by `stretto.planner.memory` is
within the limit. The predicted step time is not below the reported lower bound. No preset that fits
is faster. A pair that is run passes if the memory tracker of every rank stays within the limit in
each step. Prints a JSON object for each failed pair, then one for the total; the exit status is 1
if a pair failed.
"""

import argparse
import copy
import json
import random
import subprocess
import sys
import time
from itertools import pairwise

import torch
from torch import nn

from stretto.cluster.detect import detect_world
from stretto.comm.connect import connect
from stretto.comm.transport import Transport
from stretto.models import GPTConfig, build_model, per_sample_loss
from stretto.optim import AdamWConfig, SGDConfig, make_optimizer
from stretto.planner.memory import Footprints
from stretto.planner.model_units import called_modules, find_units
from stretto.planner.planner import make_plan
from stretto.planner.presets import PresetOptions, preset_plan
from stretto.planner.profile import Link, Profile, UnitCost
from stretto.planner.timing import time_plan
from stretto.planner.unit_choices import OptionAssigner, PlanConstraints, all_options
from stretto.strategies.sharded.assembly import ModelInfo
from stretto.strategies.sharded.config import ShardedConfig
from stretto.strategies.sharded.sharded import Sharded

STEPS = 4


def main() -> int:
    """Check the pairs and print those that failed; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--execute", type=int, default=0, help="pairs to run on two ranks")
    parser.add_argument("--rank", action="store_true", help="run as one of the two ranks")
    args = parser.parse_args()
    if args.execute and not args.rank:
        return _start_ranks(args.execute, args.first)
    transport = connect(detect_world(), 120.0) if args.rank else None
    count = args.execute or args.pairs
    failed, began_s = 0, time.monotonic()
    for number in range(count):
        seed = args.first + number
        wrong = run_pair(seed, transport) if transport else simulate_pair(seed)
        if wrong:
            failed += 1
            print(json.dumps({"seed": seed, "wrong": wrong}), flush=True)
        if number % 20 == 19 and (transport is None or transport.rank == 0):
            print(f"{number + 1} of {count}, {failed} failed", file=sys.stderr)
    if transport is None or transport.rank == 0:
        seconds = round(time.monotonic() - began_s, 1)
        total = {"pairs": count, "run": bool(transport), "failed": failed, "seconds": seconds}
        print(json.dumps(total))
    if transport:
        transport.close()
    return 1 if failed else 0


def _start_ranks(count: int, first: int) -> int:
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    arguments = ["--rank", "--execute", str(count), "--first", str(first)]
    command = [*torchrun, "-m", "benchmarks.memory_limits", *arguments]
    return subprocess.run(command, check=False).returncode


def drawn_profile(draw: random.Random) -> Profile:
    """Return the profile of a random model of 1 to 16 units on a random link."""
    units = tuple(
        UnitCost(
            name=f"unit {index}",
            numel=round(10 ** draw.uniform(4, 6)),
            forward_s=10 ** draw.uniform(-4, -2),
            backward_s=10 ** draw.uniform(-4, -1.7),
            activation_bytes=round(10 ** draw.uniform(3, 7)),
            input_bytes=round(10 ** draw.uniform(2, 3)),
            workspace_bytes=round(10 ** draw.uniform(0, 6)),
            used_often=draw.random() < 0.1,
        )
        for index in range(draw.randint(1, 16))
    )
    hosts = draw.choice([1, 1, 2])
    link = Link(
        ranks=hosts * draw.randint(1, 4),
        latency_s=10 ** draw.uniform(-6, -3),
        bytes_per_s=10 ** draw.uniform(7, 9.5),
        lanes=draw.choice([1, 1, 3]),
        hosts=hosts,
        inner_bytes_per_s=1e10,
    )
    half = draw.random() < 0.3
    widths = {"parameter_bytes": 2, "gradient_bytes": 2} if half else {}
    return Profile(
        units=units,
        link=link,
        slowdown=draw.choice([1.0, 1.3]),
        update_s=1e-3,
        state_bytes=draw.choice([0, 4, 8]),
        other_bytes=draw.choice([0, 10_000]),
        **widths,
    )


def drawn_memory_limit(profile: Profile, allowed: PlanConstraints, draw: random.Random) -> int:
    """Return a random limit between the smallest feasible one and the peak of the preset dear."""
    footprints = Footprints(profile)
    assigner = OptionAssigner(
        profile, all_options(profile, allowed, footprints), footprints, allowed
    )
    least = footprints.peak(assigner.just_in_time_plan_of(assigner.least_peak_options()))
    most = footprints.peak(
        preset_plan("dear", profile.shapes, PresetOptions(barrier=allowed.barrier))
    )
    return round(least + max(most - least, 0) * draw.random() ** 2)


def simulate_pair(seed: int) -> str:
    """Plan one simulated pair; return a description of its failure, empty if it passes."""
    draw = random.Random(seed)
    profile = drawn_profile(draw)
    allowed = PlanConstraints(
        barrier=draw.random() < 0.3,
        whole_layers=draw.random() < 0.2,
        checkpoint=draw.random() < 0.3,
        blocks=draw.random() < 0.8,
    )
    memory_limit = drawn_memory_limit(profile, allowed, draw)
    try:
        planned = make_plan(profile, memory_limit, allowed)
    except Exception as wrong:  # noqa: BLE001 - any failure is reported
        return f"{type(wrong).__name__}: {wrong}"
    footprints = Footprints(profile)
    if footprints.peak(planned.plan) > memory_limit:
        return f"keeps {footprints.peak(planned.plan)} of {memory_limit}"
    step_s = time_plan(planned.plan, profile).step_s
    if step_s < planned.bound_s * (1 - 1e-9):
        return f"takes {step_s}, the bound is {planned.bound_s}"
    for name in ("ddp", "dear", "zero2", "zero3"):
        preset_options = PresetOptions(
            1, barrier=allowed.barrier, whole_layers=allowed.whole_layers
        )
        preset = preset_plan(name, profile.shapes, preset_options)
        fits = footprints.peak(preset) <= memory_limit
        preset_s = time_plan(preset, profile).step_s
        if fits and preset_s < step_s * (1 - 1e-9):
            return f"takes {step_s}, {name} {preset_s}"
        if fits and preset_s < planned.bound_s * (1 - 1e-9):
            return f"{name} takes {preset_s}, the bound is {planned.bound_s}"
    return ""


def drawn_model(draw: random.Random) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a random small model and a batch for it."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    if draw.random() < 0.4:
        heads = draw.choice([1, 2])
        config = GPTConfig(
            vocab=draw.randint(16, 300),
            context=8,
            width=8 * heads * draw.randint(1, 3),
            blocks=draw.randint(1, 4),
            heads=heads,
            tied=draw.random() < 0.5,
            dropout=0.0,
        )
        tokens = torch.randint(config.vocab, (4, 9), generator=generator)
        return build_model(config, 0), tokens[:, :-1], tokens[:, 1:]
    widths = [round(10 ** draw.uniform(0.7, 2.3)) for _ in range(draw.randint(2, 9))]
    torch.manual_seed(draw.randrange(1 << 30))
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    inputs = torch.randn(4, widths[0], generator=generator)
    return nn.Sequential(*layers), inputs, torch.zeros(4, dtype=torch.long)


def run_pair(seed: int, transport: Transport) -> str:
    """Plan a model, train it a few steps; return a description of the failure, empty if none."""
    draw = random.Random(seed)
    model, inputs, targets = drawn_model(draw)
    optim = draw.choice([SGDConfig(lr=0.1, momentum=0.9), AdamWConfig(lr=0.01)])
    barrier = draw.random() < 0.3
    with torch.no_grad():
        calls = called_modules(model, lambda: model(inputs))
    units = find_units(model, 0, calls)
    costs = tuple(
        UnitCost(
            name=unit.name,
            numel=unit.numel,
            tensors=tuple(p.numel() for p in unit.parameters),
            forward_s=10 ** draw.uniform(-4, -3),
            backward_s=10 ** draw.uniform(-4, -3),
            used_often=unit.used_often,
        )
        for unit in units
    )
    link = Link(ranks=2, latency_s=1e-5, bytes_per_s=10 ** draw.uniform(6, 9))
    state = 4 if isinstance(optim, SGDConfig) else 8
    profile = Profile(units=costs, link=link, state_bytes=state)
    memory_limit = drawn_memory_limit(profile, PlanConstraints(barrier=barrier), draw)
    config = ShardedConfig(memory=memory_limit, unit=0)
    strategy = Sharded(config, transport)
    strategy.reads_gradients = barrier
    strategy.model_info = ModelInfo(calls, profile)
    model, optimizer = strategy.attach(copy.deepcopy(model), make_optimizer(optim, model))
    most = 0
    for step in range(STEPS):
        strategy.begin(step, 0, True, 0.1)
        (per_sample_loss(model(inputs), targets).mean() / transport.size).backward()
        if not strategy.after_backward().is_applied:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        strategy.after_update()
        if step:  # from the second step on, the optimizer state exists
            most = max(most, *strategy.memory_tracker.peaks)
        strategy.memory_tracker.reset_peaks()
    kinds = {unit.sharding for unit in strategy.plan.units}
    strategy.consolidate()
    strategy.close()
    return f"keeps {most} of {memory_limit} ({sorted(kinds)})" if most > memory_limit else ""


if __name__ == "__main__":
    sys.exit(main())
