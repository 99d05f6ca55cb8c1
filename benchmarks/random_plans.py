"""Verify the step programs of random valid plans: none may be refused.

    python -m benchmarks.random_plans [--count 500] [--first 0]

Prints a JSON object for each plan that is refused, then one for the total; the exit status is 1 if
one was. `make test` verifies the first 100.
"""

import argparse
import json
import sys

from stretto.errors import StrettoError
from stretto.program.verify import verify
from tests.laws.program_settings import Setting

MESHES = [(1, 1), (1, 1, 1), (2, 2)]


def refused(seed: int) -> str:
    """Return why the plan of ``seed`` is refused; "" if it is accepted."""
    values = {"plan": f"random {seed}", "unit": 0}
    setting = Setting("sharded", values, MESHES[seed % 3], reads_gradients=seed % 7 == 0)
    try:
        verify(setting.program())
    except StrettoError as reason:
        return str(reason)
    return ""


def main() -> int:
    """Verify as many plans as asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    seeds = range(asked.first, asked.first + asked.count)
    reasons = {seed: reason for seed in seeds if (reason := refused(seed))}
    for seed, reason in reasons.items():
        print(json.dumps({"seed": seed, "refused": reason}))
    print(json.dumps({"plans": len(seeds), "refused": len(reasons)}))
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
