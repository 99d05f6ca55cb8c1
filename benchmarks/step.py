"""Step time of the 25 MB GPT against peers at their best, in a cluster in a box.

    python benchmarks/step.py                                     all-reduce; ``make bench``
    python benchmarks/step.py dear zero2 zero3 --rates 200mbit 400mbit 800mbit --runs 5

Every case keeps a record. All-reduce must hold its claim; of the sharded plans, seconds and bytes
are told beside those of tuned DDP and of FSDP2 with the same memory.
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
"""By the word that asks for it: how its record's name begins, and its settings."""
ALLOWED = 1.03
"""How much slower than tuned DDP an all-reduce step may be."""

Row = dict[str, object]


def main() -> int:
    """Measure, keep the records, say whether the claim holds."""
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
    """Measure one case at one rate; return its exit code."""
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
    """Return ours beside a peer, in words."""
    seconds, num_bytes = ratio(row, "s"), ratio(row, "bytes")
    return f"{seconds:.3f} of the time, {num_bytes:.3f} of the bytes of {row['peer']}"


def ratio(row: Row, unit: str) -> float:
    """Return ours over the peer's, in seconds ("s") or bytes."""
    return float(str(row[f"ours_{unit}"])) / float(str(row[f"peer_{unit}"]))


if __name__ == "__main__":
    sys.exit(main())
