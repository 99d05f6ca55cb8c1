"""Virtual workers on a GPU: one recorded step of all, against the same workers one after another.

    python -m benchmarks.virtual_gpu [--workers 64] [--samples 32] [--steps 40]

A CIFAR ResNet for each worker, bf16, SGD with momentum, gossip included; samples are ready on the
host, so that the input pipeline is no part of it. Images in a second, in turn, five times each.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator

import numpy as np

from stretto.config import load
from stretto.data.loader import LoadedShare
from stretto.data.order import Share
from stretto.recipes.benchmarks import Tables
from stretto.run import RunConfig, prepare
from stretto.virtual import find_device
from stretto.virtual.in_step import InStep
from stretto.virtual.learners import Learners
from stretto.virtual.repeated import RECORDS

WARM_UP = 3


def main() -> int:
    """Time both in turn; print a line for each, and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    rates: dict[str, list[float]] = {"one after another": [], "recorded": []}
    for _ in range(5):
        for name, found in rates.items():
            found.append(images_per_s(args, recorded=name == "recorded"))
            print(json.dumps({"case": name, "images_per_s": found[-1]}), flush=True)
    slow, fast = (statistics.median(found) for found in rates.values())
    print(json.dumps({"case": "ratio", "recorded": fast, "one after another": slow}))
    print(f"{fast / slow:.1f} times as fast")
    return 0 if fast >= 10 * slow else 1


def images_per_s(args: argparse.Namespace, *, recorded: bool) -> float:
    """Return what workers of one kind come to."""
    config = load(RunConfig, None, recipe=resnets(args.workers * args.samples)).config
    device = find_device(args.device)
    learners = Learners(config, prepare(config), args.workers, args.workers, device)
    kept = dict(RECORDS)
    if not recorded:
        RECORDS.clear()
    try:
        steps = InStep(learners).steps(batches(config, WARM_UP + args.steps))
        for _ in range(WARM_UP):
            next(steps)
        began_s = time.monotonic()
        for _ in steps:  # the loss of each is read: nothing is only queued
            pass
        return args.steps * config.train.batch / (time.monotonic() - began_s)
    finally:
        RECORDS.update(kept)


def batches(config: RunConfig, count: int) -> Iterator[LoadedShare]:
    """Yield the same samples again and again."""
    some = Share(np.arange(config.train.batch), epoch=0)
    inputs, targets = prepare(config).source.batch(some.samples)
    for _ in range(count):
        yield LoadedShare(some, inputs, targets, wait_s=0.0)


def resnets(batch: int) -> Tables:
    """Return the run."""
    return {
        "model": {"kind": "resnet", "depth": 18, "width": 16, "stem": "small", "classes": 8},
        "data": {"kind": "shapes", "size": 32, "samples": batch, "test_samples": 8},
        "optim": {"kind": "sgd", "lr": 0.1, "momentum": 0.9},
        "strategy": {"kind": "crossover"},
        "train": {"batch": batch, "precision": "bf16"},
    }


if __name__ == "__main__":
    sys.exit(main())
