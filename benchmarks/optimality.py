"""Compare the planner with an exact solver on random small instances.

    python -m benchmarks.optimality [--count 100] [--first 0] [--limit-s 60]

Needs an interpreter with OR-Tools (the extra exact). The exact solver finds the best plan of whole
units. Prints a JSON object per instance, then one for the total. An instance has:

- the step time of the solver's plan, and whether it is proven to be the best;
- the step time of the planner's plan, its gap to the solver's, and the reported lower bound;
- how long each of them searched.

The exit status is 1 if a bound is above the best plan, if the planner refused a memory limit for
which there is a plan, or if the gaps are too large. A gap below zero is no error: the planner may
cut units into blocks.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

from stretto.errors import ConfigError
from stretto.planner.planner import make_plan
from stretto.renamed import with_old_keys
from tests.exact.instances import draw_instance
from tests.exact.problem import solve, solver_python

MEAN, WORST = 0.01, 0.05
"""Largest mean and largest single gap that are accepted, relative to the best step time."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The exact and the planned result of one instance; times in seconds."""

    seed: int
    units: int
    barrier: bool
    memory_limit: int
    exact_s: float
    proven: bool
    planned_s: float | None
    """None if the planner reports that nothing fits."""
    gap: float | None
    bound_s: float | None
    how: str
    exact_took_s: float
    planner_took_s: float

    @property
    def is_valid(self) -> bool:
        """Whether the planner found a plan, and its bound is not above the best step time."""
        return self.bound_s is not None and self.bound_s <= self.exact_s * (1 + 1e-9)


def main() -> int:
    """Compare all instances; return 1 if a check failed, 2 without OR-Tools."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--limit-s", type=float, default=60.0, help="seconds that the exact solver may search"
    )
    args = parser.parse_args()
    if solver_python() is None:
        print("no interpreter here has OR-Tools: install the extra exact", file=sys.stderr)
        return 2
    results = []
    for seed in range(args.first, args.first + args.count):
        results.append(compare(seed, args.limit_s))
        print(json.dumps(with_old_keys(asdict(results[-1]))), flush=True)
        if len(results) % 10 == 0:
            print(f"{len(results)} of {args.count} instances", file=sys.stderr)
    return summarize(results)


def compare(seed: int, limit_s: float) -> Compared:
    """Solve one instance with the exact solver and with the planner."""
    instance = draw_instance(seed)
    (exact,) = solve([instance], limit_s)
    began_s = time.monotonic()
    try:
        planned = make_plan(instance.profile, instance.memory_limit, barrier=instance.barrier)
    except ConfigError:
        planned = None
    took_s = time.monotonic() - began_s
    return Compared(
        seed=seed,
        units=len(instance.profile.units),
        barrier=instance.barrier,
        memory_limit=instance.memory_limit,
        exact_s=exact.step_s,
        proven=exact.proven,
        planned_s=planned.step_s if planned else None,
        gap=planned.step_s / exact.step_s - 1 if planned else None,
        bound_s=planned.bound_s if planned else None,
        how=planned.how if planned else "refused",
        exact_took_s=round(exact.seconds, 3),
        planner_took_s=round(took_s, 3),
    )


def summarize(results: list[Compared]) -> int:
    """Print the summary of all instances; return 1 if a check failed."""
    # Without a proof, the solver's plan may not be the best, and the gap means little.
    gaps = [one.gap for one in results if one.proven and one.gap is not None]
    invalid = [one.seed for one in results if not one.is_valid]
    mean, worst = (statistics.fmean(gaps), max(gaps)) if gaps else (0.0, 0.0)
    held = not invalid and mean <= MEAN and worst <= WORST
    facts = {
        "instances": len(results),
        "proven": sum(one.proven for one in results),
        "refused": sum(one.planned_s is None for one in results),
        "unsound": invalid,
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
