"""4 real hosts beside 4 virtual workers: the same run, strategy by strategy and seed by seed.

    python -m benchmarks.real_and_virtual [--seeds 3] [--rate 200mbit]

Real ones train in a lab, virtual ones in one process; both on the images of `benchmarks/runs/
cifar_small.toml`, with the rate that was best in the studies. A line for each pair, then one for
each strategy: it holds where the two means are no further apart than seeds are.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import ROOT, record
from stretto.recipes import load_run
from stretto.run import RunConfig
from stretto.study.scaling.cells import Basis, run_cell
from stretto.study.scaling.sweep import Cell, Point
from stretto.study.words import strategy_word
from stretto.telemetry.events import EvalDone, from_record

RUN = "benchmarks/runs/cifar_small.toml"
HOSTS, FACTOR = 4, 2.0
STRATEGIES = ("allreduce", "crossover", "crossover:delay=1", "sgp:delay=1")


def main() -> int:
    """Train all of them, keep the record; return 1 where some strategy does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        return compare(args.seeds, args.rate)
    again = ["--seeds", str(args.seeds), "--rate", args.rate, "--alone"]
    command = ["python", "-m", "benchmarks.real_and_virtual", *again]
    return record(f"real_and_virtual_{args.rate}", command)[0]


def compare(seeds: int, rate: str) -> int:
    """Print every pair and what each strategy comes to."""
    failed = 0
    for word in STRATEGIES:
        pairs = []
        for seed in range(seeds):
            pair = {"real": real(word, seed, rate), "virtual": virtual(word, seed)}
            print(json.dumps({"strategy": word, "seed": seed, **pair}), flush=True)
            pairs.append((pair["real"], pair["virtual"]))
        means = [statistics.fmean(one) for one in zip(*pairs, strict=True)]
        spread = max(statistics.stdev(one) for one in zip(*pairs, strict=True))
        holds = abs(means[0] - means[1]) <= spread
        failed += not holds
        told = {"real_mean": means[0], "virtual_mean": means[1], "spread": spread, "holds": holds}
        print(json.dumps({"strategy": word, **told}), flush=True)
    return 1 if failed else 0


def real(word: str, seed: int, rate: str) -> float:
    """Return the accuracy that hosts of a lab come to."""
    kind, its_own = strategy_word(word)
    with tempfile.TemporaryDirectory() as folder:
        place = [f"run.folder={folder}", "run.name=real", f"run.seed={seed}"]
        strategy = [f"strategy.kind={kind}", *its_own, f"optim.lr={settings().optim.lr * FACTOR!r}"]
        train = ["stretto", "train", RUN, *place, *strategy]
        lab = ["stretto", "lab", "--hosts", str(HOSTS), "--rate", rate, "--", *train]
        done = subprocess.run(lab, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        return last_accuracy(Path(folder) / "real" / "events.jsonl")


def last_accuracy(events: Path) -> float:
    """Return the accuracy of the last evaluation of a run."""
    lines = events.read_text(encoding="utf-8").splitlines()
    told = [from_record(json.loads(line)) for line in lines]
    *_, last = (event for event in told if isinstance(event, EvalDone))
    assert last.accuracy is not None
    return last.accuracy


def virtual(word: str, seed: int) -> float:
    """Return the accuracy that virtual workers come to."""
    return run_cell(
        Basis(RUN), Cell(Point(word, HOSTS, settings().train.batch), FACTOR, seed)
    ).accuracy


def settings() -> RunConfig:
    """Return the run as its file has it."""
    return load_run(Path(RUN), []).config


if __name__ == "__main__":
    sys.exit(main())
