"""Run the long tests, mostly of faults, each with a record; ``make campaign``."""

import sys

from record import record

CAMPAIGNS = {
    # With the real store, whose import of torch is slow, so that kills hit before and after it.
    "lab_kills": [
        *("python", "benchmarks/lab_kills.py", "--count", "20", "--seed", "7"),
        *("--store", "real", "--latest-s", "5"),
    ],
    "resume_kills": ["python", "-m", "benchmarks.resume_kills", "--count", "20", "--seed", "7"],
    "launcher_kills": ["python", "-m", "benchmarks.launcher_kills", "--count", "20", "--seed", "7"],
    "rank_stops": ["python", "-m", "benchmarks.rank_stops", "--count", "20", "--seed", "7"],
    "images": ["python", "-m", "benchmarks.images"],
    "recipes": ["python", "-m", "benchmarks.recipes"],
    "plans": ["python", "-m", "benchmarks.plans"],
    "random_plans": ["python", "-m", "benchmarks.random_plans"],
    "memory_limits": ["python", "-m", "benchmarks.memory_limits"],
    "optimality": ["python", "-m", "benchmarks.optimality"],
}


def main() -> int:
    """Run all campaigns; return 1 if one failed."""
    codes = {name: record(name, command)[0] for name, command in CAMPAIGNS.items()}
    for name, code in codes.items():
        print(f"{name}: {'passed' if code == 0 else f'FAILED with {code}'}")
    return 1 if any(codes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
