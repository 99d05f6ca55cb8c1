"""Compare planned step times with bounds and presets, on profiles made from layer shapes.

    python -m benchmarks.planning [--record]

There are four profiles and three memory limits each. The low limit is the peak of `zero3` that
unshards one unit ahead, the high one is the peak of `zero2`, and the middle one is their mean. GPTs
of 24, 96 and 1,000 units follow, at their middle limits. Each line of the output has:

- the step time of the plan, and its lower bound;
- the step time of the plan that is found without a solver, and of the best preset that fits;
- how long planning took.
"""

import argparse
import json
import sys
import time
from collections import Counter

from benchmarks.profiles import gpt, in_bf16, profiles
from benchmarks.record import record
from stretto.planner.memory import Footprints
from stretto.planner.planner import make_plan
from stretto.planner.presets import PresetOptions, preset_plan
from stretto.planner.profile import Profile
from stretto.planner.timing import time_plan
from stretto.renamed import with_old_keys

EAGER = (("ddp", None), ("zero2", 1), ("zero2", 2), ("zero3", 1), ("zero3", 2))
SIZES = (24, 96, 1000)


def main() -> int:
    """Plan every profile, and print a JSON object for each memory limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="keep a record")
    if parser.parse_args().record:
        code, _ = record("planning", ["python", "-m", "benchmarks.planning"])
        return code
    for name, profile in profiles().items():
        for level, limit in memory_limits(profile).items():
            print(json.dumps(with_old_keys(planned(name, profile, level, limit))), flush=True)
    for size in SIZES:
        profile = in_bf16(gpt(tokens=4096, blocks=size - 2), 80)
        limit = memory_limits(profile)["middle"]
        result = planned(f"gpt of {size} units", profile, "middle", limit)
        print(json.dumps(with_old_keys(result)), flush=True)
    return 0


def memory_limits(profile: Profile) -> dict[str, int]:
    """Return the three memory limits by name, in bytes."""
    zero3 = preset_plan("zero3", profile.shapes, PresetOptions(1, 1, barrier=True))
    zero2 = preset_plan("zero2", profile.shapes, PresetOptions(1, barrier=True))
    low, high = (Footprints(profile).peak(plan) for plan in (zero3, zero2))
    return {"low": low, "middle": (low + high) // 2, "high": high}


def planned(name: str, profile: Profile, level: str, limit: int) -> dict[str, object]:
    """Return the results for one memory limit of ``limit`` bytes, as JSON values."""
    began_s = time.monotonic()
    made = make_plan(profile, limit)
    took_s = time.monotonic() - began_s
    eager_s = best_eager_s(profile, limit)
    return {
        "profile": name,
        "units": len(profile.units),
        "memory_limit": level,
        "plan_ms": round(made.step_s * 1e3, 2),
        "bound_ms": round(made.bound_s * 1e3, 2),
        "gap": round(made.gap, 4),
        "greedy_ms": round(made.greedy_s * 1e3, 2),
        "eager_ms": round(eager_s * 1e3, 2),
        "faster": round(eager_s / made.step_s, 3),
        "kept_as": dict(Counter(str(unit.sharding) for unit in made.plan.units)),
        "planning_s": round(took_s, 2),
    }


def best_eager_s(profile: Profile, limit: int) -> float:
    """Return the step time of the fastest preset that fits, with a barrier and whole units."""
    steps_s = []
    for name, ahead in EAGER:
        for reduce_slots in (1, None):
            plan = preset_plan(
                name, profile.shapes, PresetOptions(ahead, reduce_slots, barrier=True)
            )
            if Footprints(profile).peak(plan) <= limit:
                steps_s.append(time_plan(plan, profile).step_s)
    return min(steps_s)


if __name__ == "__main__":
    sys.exit(main())
