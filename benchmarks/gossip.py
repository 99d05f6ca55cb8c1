"""Measure gossip and local updates against tuned DDP and the lower bound, in a lab.

    python -m benchmarks.gossip [CASE ...] [--rate 200mbit] [--runs 5]   seconds of a step
    python -m benchmarks.gossip --bytes [CASE ...]                        bytes on the links

Every case keeps a record. Steps are those of ``stretto bench step`` with the 25 MB GPT; the steps
of a round are timed together. Bytes are those that the lab counts on host 0's link. The difference
of two runs with 2 and 42 steps is compared with the bytes of the model's parameters.
"""

import argparse
import json
import re
import subprocess
import sys

from benchmarks.record import record
from stretto.units import parse_bytes

HOSTS = 4
CASES: dict[str, tuple[int, list[str]]] = {
    "crossover": (4, ["strategy.kind=crossover", "strategy.delay=1"]),
    "sgp": (4, ["strategy.kind=sgp", "strategy.delay=1", "strategy.segments=fine"]),
    "dpsgd": (4, ["strategy.kind=dpsgd", "strategy.segments=fine"]),
    "slowmo": (12, ["strategy.kind=slowmo", "strategy.every=12"]),
    "diloco": (16, ["strategy.kind=diloco", "strategy.every=16"]),
}
"""By name: the steps that are timed together, and the settings."""
OF_DDP, OF_BOUND = 0.72, 1.25
"""Largest time of crossover relative to tuned DDP and to the bound, at 200 Mbit/s."""
FEW, MANY, ROUNDS = 2, 42, 2
"""Steps of the two runs whose bytes are compared, and how often a run repeats its steps."""


def main() -> int:
    """Measure the cases and keep records; return the largest exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--runs", default="5")
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--count", metavar="CASE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for case in args.cases:
        if case not in CASES:
            parser.error(f"no case {case!r}; known: {', '.join(CASES)}")
    if args.count:
        return count(args.count)
    cases = args.cases or (["crossover"] if args.bytes else list(CASES))
    if args.bytes:
        command = ["python", "-m", "benchmarks.gossip", "--count"]
        return max(record(f"gossip_{case}_bytes", [*command, case])[0] for case in cases)
    return max(seconds(case, args.rate, args.runs) for case in cases)


def seconds(case: str, rate: str, runs: str) -> int:
    """Time one case; return its exit code, or 1 if a limit is exceeded."""
    steps, settings = CASES[case]
    bench = ["stretto", "bench", "step", "--json", "--runs", runs, "--steps", str(steps)]
    code, rows = record(f"gossip_{case}_{rate}", [*lab(rate), *bench, *settings])
    if code:
        return code
    tuned = next(row for row in rows if str(row["peer"]).endswith("(tuned)"))
    ours, ddp = (float(str(tuned[key])) for key in ("ours_s", "peer_s"))
    bound = tuned["bound_s"]
    of_bound = "" if bound is None else f", {ours / float(str(bound)):.3f} of the bound"
    print(f"{case}: {ours:.3f} s, {ours / ddp:.3f} of {tuned['peer']} ({ddp:.3f} s){of_bound}")
    if case != "crossover" or rate != "200mbit":
        return 0
    held = ours <= OF_DDP * ddp and bound is not None and ours <= OF_BOUND * float(str(bound))
    print(f"{'holds' if held else 'BROKEN'}: {OF_DDP} of tuned DDP, {OF_BOUND} of the bound")
    return 0 if held else 1


def count(case: str) -> int:
    """Print the bytes per step of ``case`` on a link, and those of the parameters.

    Returns 1 if they differ by more than 5 %.
    """
    few, many = (sent(case, steps) for steps in (FEW, MANY))
    measured = (many - few) / ((MANY - FEW) * ROUNDS)
    theory = parameters_bytes()
    row = {"case": case, "bytes_a_step": measured, "theory": theory, "ratio": measured / theory}
    print(json.dumps(row))
    return 0 if abs(row["ratio"] - 1) <= 0.05 else 1


def sent(case: str, steps: int) -> float:
    """Return the bytes that host 0 sent in a run that times ``steps`` together."""
    bench = ["stretto", "bench", "step", "--runs", "1", "--steps", str(steps), "--peers", "none"]
    command = [*lab("800mbit"), *bench, *CASES[case][1]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    (sent_text,) = re.findall(r"host 0: sent ([\d.]+ \w+)", done.stderr)
    return parse_bytes(sent_text.replace(" ", ""))


def parameters_bytes() -> int:
    """Return the bytes of the parameters of the timed model."""
    from stretto.config import load
    from stretto.models import build_model
    from stretto.recipes.small_runs import gpt_25mb
    from stretto.run import RunConfig

    config = load(RunConfig, None, recipe=gpt_25mb(HOSTS)).config
    return sum(p.nbytes for p in build_model(config.model, 0).parameters())


def lab(rate: str) -> list[str]:
    """Return the beginning of a command that runs in the lab."""
    return ["stretto", "lab", "--hosts", str(HOSTS), "--rate", rate, "--"]


if __name__ == "__main__":
    sys.exit(main())
