"""No plan is over its budget: random models and budgets, simulated and run.

    python -m benchmarks.budgets [--pairs 500] [--first 0]           simulated
    python -m benchmarks.budgets --execute 50                        on two ranks, two processes

Simulated: what `stretto.plan.memory` charges at most, slot by slot, is within the budget, the time
of the plan is not below the reported bound, and no preset that fits is faster. Run: the ledger of
every rank stays within it, step after step. One JSON object a pair that does not hold, one for
all; exit status 1 if there is any.
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

from stretto.cluster.detect import detect
from stretto.comm.channel import Channel
from stretto.comm.connect import connect
from stretto.model import GPTConfig, build_model, per_sample_loss
from stretto.optim import AdamWConfig, SGDConfig, make_optimizer
from stretto.plan.choosing import Choosing
from stretto.plan.footprint import Footprints
from stretto.plan.options import Allowed, all_options
from stretto.plan.planner import make_plan
from stretto.plan.presets import Wish, named_plan
from stretto.plan.profile import Link, Profile, UnitCost
from stretto.plan.timing import time_plan
from stretto.plan.units import called_modules, find_units
from stretto.strategy.sharded.config import ShardedConfig
from stretto.strategy.sharded.known import Known
from stretto.strategy.sharded.strategy import Sharded

STEPS = 4


def main() -> int:
    """Try the pairs; say what did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--execute", type=int, default=0, help="pairs to run on two ranks")
    parser.add_argument("--rank", action="store_true", help="be one of the two ranks")
    args = parser.parse_args()
    if args.execute and not args.rank:
        return _start_ranks(args.execute, args.first)
    channel = connect(detect(), 120.0) if args.rank else None
    count = args.execute or args.pairs
    failed, began_s = 0, time.monotonic()
    for number in range(count):
        seed = args.first + number
        wrong = run_pair(seed, channel) if channel else simulate_pair(seed)
        if wrong:
            failed += 1
            print(json.dumps({"seed": seed, "wrong": wrong}), flush=True)
        if number % 20 == 19 and (channel is None or channel.rank == 0):
            print(f"{number + 1} of {count}, {failed} failed", file=sys.stderr)
    if channel is None or channel.rank == 0:
        seconds = round(time.monotonic() - began_s, 1)
        told = {"pairs": count, "run": bool(channel), "failed": failed, "seconds": seconds}
        print(json.dumps(told))
    if channel:
        channel.close()
    return 1 if failed else 0


def _start_ranks(count: int, first: int) -> int:
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    words = ["--rank", "--execute", str(count), "--first", str(first)]
    command = [*torchrun, "-m", "benchmarks.budgets", *words]
    return subprocess.run(command, check=False).returncode


def drawn_profile(draw: random.Random) -> Profile:
    """Return a random model on a random link: 1 to 16 units of sizes a factor 100 apart."""
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


def drawn_budget(profile: Profile, allowed: Allowed, draw: random.Random) -> int:
    """Return a budget between the least that will do and what needs all to stay."""
    footprints = Footprints(profile)
    choosing = Choosing(profile, all_options(profile, allowed, footprints), footprints, allowed)
    least = footprints.peak(choosing.tightest(choosing.smallest()))
    most = footprints.peak(named_plan("dear", profile.shapes, Wish(barrier=allowed.barrier)))
    return round(least + max(most - least, 0) * draw.random() ** 2)


def simulate_pair(seed: int) -> str:
    """Plan one pair; return what is wrong with the plan, nothing if it holds."""
    draw = random.Random(seed)
    profile = drawn_profile(draw)
    allowed = Allowed(
        barrier=draw.random() < 0.3,
        whole_layers=draw.random() < 0.2,
        checkpoint=draw.random() < 0.3,
        blocks=draw.random() < 0.8,
    )
    budget = drawn_budget(profile, allowed, draw)
    try:
        planned = make_plan(profile, budget, allowed)
    except Exception as wrong:  # noqa: BLE001 - whatever it is, it is told
        return f"{type(wrong).__name__}: {wrong}"
    footprints = Footprints(profile)
    if footprints.peak(planned.plan) > budget:
        return f"keeps {footprints.peak(planned.plan)} of {budget}"
    step_s = time_plan(planned.plan, profile).step_s
    if step_s < planned.bound_s * (1 - 1e-9):
        return f"takes {step_s}, the bound is {planned.bound_s}"
    for name in ("ddp", "dear", "zero2", "zero3"):
        wish = Wish(1, barrier=allowed.barrier, whole_layers=allowed.whole_layers)
        preset = named_plan(name, profile.shapes, wish)
        fits = footprints.peak(preset) <= budget
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


def run_pair(seed: int, channel: Channel) -> str:
    """Plan one model and train it for a few steps; return what is wrong, nothing if it holds."""
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
    budget = drawn_budget(profile, Allowed(barrier=barrier), draw)
    config = ShardedConfig(memory=budget, unit=0)
    strategy = Sharded(config, channel)
    strategy.reads_gradients = barrier
    strategy.known = Known(calls, profile)
    model, optimizer = strategy.attach(copy.deepcopy(model), make_optimizer(optim, model))
    most = 0
    for step in range(STEPS):
        strategy.begin(step, 0, True, 0.1)
        (per_sample_loss(model(inputs), targets).mean() / channel.size).backward()
        if not strategy.after_backward().done:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        strategy.after_update()
        if step:  # by then the optimizer remembers what it will
            most = max(most, *strategy.ledger.peaks)
        strategy.ledger.forget()
    kinds = {unit.sharding for unit in strategy.plan.units}
    strategy.settle()
    strategy.close()
    return f"keeps {most} of {budget} ({sorted(kinds)})" if most > budget else ""


if __name__ == "__main__":
    sys.exit(main())
