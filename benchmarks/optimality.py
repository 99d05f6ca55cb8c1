"""How far the planner is from the best plan of whole units, on random small instances.

    python -m benchmarks.optimality [--count 100] [--first 0] [--limit-s 60]

Needs an interpreter with OR-Tools (the extra exact). One JSON object an instance: what the best
plan takes and whether that is proven, what the planner's takes, the gap between them, its bound,
and how long each was sought; one for all. The exit status is 1 if a bound is above the best plan,
if a budget in which there is a plan was refused, or if gaps are too large. A gap below zero is no
mistake: the planner may cut units into blocks.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

from stretto.errors import ConfigError
from stretto.plan.planner import make_plan
from tests.exact.instances import draw_instance
from tests.exact.problem import solve, solver_python

MEAN, WORST = 0.01, 0.05


@dataclass(frozen=True, slots=True)
class Compared:
    """One instance."""

    seed: int
    units: int
    barrier: bool
    budget: int
    exact_s: float
    proven: bool
    planned_s: float | None
    """None where the planner says that nothing fits."""
    gap: float | None
    bound_s: float | None
    how: str
    exact_took_s: float
    planner_took_s: float

    @property
    def is_sound(self) -> bool:
        """Whether there is a plan, and the bound is not above the best one."""
        return self.bound_s is not None and self.bound_s <= self.exact_s * (1 + 1e-9)


def main() -> int:
    """Compare, say what holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--limit-s", type=float, default=60.0, help="of the search for a proof")
    args = parser.parse_args()
    if solver_python() is None:
        print("no interpreter here has OR-Tools: install the extra exact", file=sys.stderr)
        return 2
    results = []
    for seed in range(args.first, args.first + args.count):
        results.append(compare(seed, args.limit_s))
        print(json.dumps(asdict(results[-1])), flush=True)
        if len(results) % 10 == 0:
            print(f"{len(results)} of {args.count} instances", file=sys.stderr)
    return verdict(results)


def compare(seed: int, limit_s: float) -> Compared:
    """Solve one instance twice."""
    instance = draw_instance(seed)
    (exact,) = solve([instance], limit_s)
    began_s = time.monotonic()
    try:
        planned = make_plan(instance.profile, instance.budget, barrier=instance.barrier)
    except ConfigError:
        planned = None
    took_s = time.monotonic() - began_s
    return Compared(
        seed=seed,
        units=len(instance.profile.units),
        barrier=instance.barrier,
        budget=instance.budget,
        exact_s=exact.step_s,
        proven=exact.proven,
        planned_s=planned.step_s if planned else None,
        gap=planned.step_s / exact.step_s - 1 if planned else None,
        bound_s=planned.bound_s if planned else None,
        how=planned.how if planned else "refused",
        exact_took_s=round(exact.seconds, 3),
        planner_took_s=round(took_s, 3),
    )


def verdict(results: list[Compared]) -> int:
    """Print what all of them say; return 1 when something does not hold."""
    # A gap to a plan that is not proven to be the best says little.
    gaps = [one.gap for one in results if one.proven and one.gap is not None]
    unsound = [one.seed for one in results if not one.is_sound]
    mean, worst = (statistics.fmean(gaps), max(gaps)) if gaps else (0.0, 0.0)
    held = not unsound and mean <= MEAN and worst <= WORST
    facts = {
        "instances": len(results),
        "proven": sum(one.proven for one in results),
        "refused": sum(one.planned_s is None for one in results),
        "unsound": unsound,
        "mean_gap": mean,
        "worst_gap": worst,
        "median_gap": statistics.median(gaps) if gaps else 0.0,
        "best_found": sum(gap <= 1e-9 for gap in gaps),
        "holds": held,
    }
    print(json.dumps(facts))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
