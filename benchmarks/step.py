"""Measure the step time of the 25 MB GPT against tuned peers, in a lab on one machine.

    python benchmarks/step.py                                     all-reduce; ``make bench``
    python benchmarks/step.py dear zero2 zero3 --rates 200mbit 400mbit 800mbit --runs 5

Every case keeps a record. All-reduce is checked against a limit relative to tuned DDP. For the
sharded plans, seconds and bytes are printed relative to tuned DDP and to FSDP2.
"""

import argparse
import sys

from record import record

HOSTS = 4
RATE = "400mbit"
BENCH = ["stretto", "bench", "step", "--json"]
CASES = {
    "allreduce": ("step", []),
    **{
        plan: (plan, ["strategy.kind=sharded", f"strategy.plan={plan}"])
        for plan in ("dear", "zero2", "zero3")
    },
}
"""By the name on the command line: the prefix of its record's name, and its settings."""
ALLOWED = 1.03
"""Largest time of an all-reduce step relative to tuned DDP."""

Row = dict[str, object]


def main() -> int:
    """Measure all cases and keep records; return the largest exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    parser.add_argument("--rates", nargs="+", default=[RATE])
    parser.add_argument("--runs", default="9")
    args = parser.parse_args()
    for case in args.cases:
        if case not in CASES:
            parser.error(f"no case {case!r}; known: {', '.join(CASES)}")
    cases = args.cases or ["allreduce"]
    codes = [run(case, rate, args.runs) for rate in args.rates for case in cases]
    return max(codes)


def run(case: str, rate: str, runs: str) -> int:
    """Measure one case at one rate; return its exit code, or 1 if the limit is exceeded."""
    name, settings = CASES[case]
    lab = ["stretto", "lab", "--hosts", str(HOSTS), "--rate", rate, "--"]
    bench = [*lab, *BENCH, "--runs", runs, *settings]
    code, rows = record(f"{name}_{HOSTS}x1_{rate}", bench)
    if code:
        return code
    for row in rows:
        if str(row["peer"]).endswith("(tuned)") or str(row["peer"]).startswith("fsdp2"):
            print(f"{case} at {rate}: {comparison(row)}")
    if case != "allreduce" or rate != RATE:
        return 0
    tuned = next(row for row in rows if str(row["peer"]).endswith("(tuned)"))
    held = ratio(tuned, "s") <= ALLOWED
    print(f"allreduce / {tuned['peer']}: {'holds' if held else 'BROKEN'}: {ALLOWED}")
    return 0 if held else 1


def comparison(row: Row) -> str:
    """Return a sentence that compares Stretto with a peer."""
    seconds, num_bytes = ratio(row, "s"), ratio(row, "bytes")
    return f"{seconds:.3f} of the time, {num_bytes:.3f} of the bytes of {row['peer']}"


def ratio(row: Row, unit: str) -> float:
    """Return Stretto's figure divided by the peer's, for the unit "s" or "bytes"."""
    return float(str(row[f"ours_{unit}"])) / float(str(row[f"peer_{unit}"]))


if __name__ == "__main__":
    sys.exit(main())
