"""The planner on profiles made from layer shapes: seconds of a step, bound, and of planning.

    python -m benchmarks.planning [--record]

For each of the four profiles and three budgets (low: what `zero3` needs that gathers one unit
ahead; high: what `zero2` needs; middle: their mean) a line says what the plan takes, what no plan
can be faster than, what is found without a solver, the best preset that fits and how long planning
took. GPTs of 24, 96 and 1,000 units follow, at their middle budgets.
"""

import argparse
import json
import sys
import time
from collections import Counter

from benchmarks.profiles import gpt, in_half, profiles
from benchmarks.record import record
from stretto.plan.footprint import Footprints
from stretto.plan.planner import make_plan
from stretto.plan.presets import Wish, named_plan
from stretto.plan.profile import Profile
from stretto.plan.timing import time_plan

EAGER = (("ddp", None), ("zero2", 1), ("zero2", 2), ("zero3", 1), ("zero3", 2))
SIZES = (24, 96, 1000)


def main() -> int:
    """Plan, and print a line of JSON for each budget."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="keep a record")
    if parser.parse_args().record:
        code, _ = record("planning", ["python", "-m", "benchmarks.planning"])
        return code
    for name, profile in profiles().items():
        for place, budget in budgets(profile).items():
            print(json.dumps(planned(name, profile, place, budget)), flush=True)
    for size in SIZES:
        profile = in_half(gpt(tokens=4096, blocks=size - 2), 80)
        budget = budgets(profile)["middle"]
        print(json.dumps(planned(f"gpt of {size} units", profile, "middle", budget)), flush=True)
    return 0


def budgets(profile: Profile) -> dict[str, int]:
    """Return the three budgets."""
    zero3 = named_plan("zero3", profile.shapes, Wish(1, 1, barrier=True))
    zero2 = named_plan("zero2", profile.shapes, Wish(1, barrier=True))
    low, high = (Footprints(profile).peak(plan) for plan in (zero3, zero2))
    return {"low": low, "middle": (low + high) // 2, "high": high}


def planned(name: str, profile: Profile, place: str, budget: int) -> dict[str, object]:
    """Return what is known of a plan for ``budget``, and of the presets that fit."""
    began_s = time.monotonic()
    made = make_plan(profile, budget)
    took_s = time.monotonic() - began_s
    eager_s = best_eager_s(profile, budget)
    return {
        "profile": name,
        "units": len(profile.units),
        "budget": place,
        "plan_ms": round(made.step_s * 1e3, 2),
        "bound_ms": round(made.bound_s * 1e3, 2),
        "gap": round(made.gap, 4),
        "greedy_ms": round(made.greedy_s * 1e3, 2),
        "eager_ms": round(eager_s * 1e3, 2),
        "faster": round(eager_s / made.step_s, 3),
        "kept_as": dict(Counter(str(unit.sharding) for unit in made.plan.units)),
        "planning_s": round(took_s, 2),
    }


def best_eager_s(profile: Profile, budget: int) -> float:
    """Return what the best preset takes that fits, with the barrier, whole units."""
    steps_s = []
    for name, ahead in EAGER:
        for pending in (1, None):
            plan = named_plan(name, profile.shapes, Wish(ahead, pending, barrier=True))
            if Footprints(profile).peak(plan) <= budget:
                steps_s.append(time_plan(plan, profile).step_s)
    return min(steps_s)


if __name__ == "__main__":
    sys.exit(main())
