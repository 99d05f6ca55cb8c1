"""Check that training with a random plan computes the same as training on one rank.

    python -m benchmarks.plans [--plans 200] [--first 1000]

Plans differ in sharding, blocks, gates, order, checkpointing and barrier. Runs differ in model,
optimizer, ranks (1 to 4, on one to three hosts), micro-batches and clipping. Prints a JSON object
for each failed plan, then one for the total; the exit status is 1 if a plan failed.
"""

import argparse
import json
import sys
import time

from stretto.cluster.world import Mesh
from stretto.comm.in_process_transports import run_threads
from stretto.strategies.sharded.config import ShardedConfig
from tests.laws.test_plans import MODELS, OPTIMIZERS, compare, reference, run_plan

MESHES = [(1,), (2,), (3,), (4,), (1, 1), (2, 2), (1, 1, 1)]


def main() -> int:
    """Check the plans and print those that failed; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    args = parser.parse_args()
    failed, began_s = 0, time.monotonic()
    for number in range(args.plans):
        seed = args.first + number
        wrong = try_plan(seed)
        if wrong:
            failed += 1
            print(json.dumps({"seed": seed, "wrong": wrong}), flush=True)
        if number % 20 == 19:
            print(f"{number + 1} of {args.plans} plans, {failed} failed", file=sys.stderr)
    seconds = round(time.monotonic() - began_s, 1)
    print(json.dumps({"plans": args.plans, "failed": failed, "seconds": seconds}))
    return 1 if failed else 0


def try_plan(seed: int) -> str:
    """Train with one plan; return a description of the failure, empty if the result is right."""
    name, optim = [*MODELS][seed % 5], [*OPTIMIZERS][seed // 5 % 4]
    mesh, micros = Mesh(MESHES[seed % len(MESHES)]), 1 + seed // 3 % 3
    clip = 0.05 if seed % 7 == 0 else None
    config = ShardedConfig(plan=f"random {seed}", unit=0)
    expected = reference(name, optim, clip)
    try:
        compare(
            run_threads(
                mesh, lambda transport: run_plan(transport, name, optim, config, micros, clip)
            ),
            expected,
        )
    except Exception as wrong:  # noqa: BLE001 - any failure is reported
        return f"{name}, {optim}, {mesh.ranks_per_host}: {type(wrong).__name__}: {wrong}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
