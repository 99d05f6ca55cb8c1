"""Time virtual workers on a GPU: one captured step of all against one worker after another.

    python -m benchmarks.virtual_gpu [--workers 64] [--samples 32] [--steps 40]

Each worker trains a CIFAR ResNet in bf16 with SGD, momentum and gossip. Samples are ready on the
host, so the input pipeline is not timed. Both variants run in turn, five times each, and print
images per second.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator

import numpy as np

from stretto.config import load
from stretto.data.loader import LoadedSamples
from stretto.data.order import RankSamples
from stretto.recipes.recipe import Tables
from stretto.run import RunConfig, prepare
from stretto.virtual import find_device
from stretto.virtual.stepping import LockStepWorkers
from stretto.virtual.worker_gradients import RECORDERS, WorkerGradients

WARM_UP = 3


def main() -> int:
    """Time both variants in turn, print the rates and their ratio; return 1 if it is below 10."""
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
    """Return the images per second of all workers, with or without a captured step."""
    config = load(RunConfig, None, recipe=resnets(args.workers * args.samples)).config
    device = find_device(args.device)
    worker_gradients = WorkerGradients(config, prepare(config), args.workers, args.workers, device)
    kept = dict(RECORDERS)
    if not recorded:
        RECORDERS.clear()
    try:
        steps = LockStepWorkers(worker_gradients).steps(batches(config, WARM_UP + args.steps))
        for _ in range(WARM_UP):
            next(steps)
        began_s = time.monotonic()
        for _ in steps:  # each yields its loss, so the GPU has finished it
            pass
        return args.steps * config.train.batch / (time.monotonic() - began_s)
    finally:
        RECORDERS.update(kept)


def batches(config: RunConfig, count: int) -> Iterator[LoadedSamples]:
    """Yield the same samples ``count`` times."""
    samples = RankSamples(np.arange(config.train.batch), epoch=0)
    inputs, targets = prepare(config).source.batch(samples.samples)
    for _ in range(count):
        yield LoadedSamples(samples, inputs, targets, wait_s=0.0)


def resnets(batch: int) -> Tables:
    """Return the settings of the run."""
    return {
        "model": {"kind": "resnet", "depth": 18, "width": 16, "stem": "small", "classes": 8},
        "data": {"kind": "shapes", "size": 32, "samples": batch, "test_samples": 8},
        "optim": {"kind": "sgd", "lr": 0.1, "momentum": 0.9},
        "strategy": {"kind": "crossover"},
        "train": {"batch": batch, "precision": "bf16"},
    }


if __name__ == "__main__":
    sys.exit(main())
