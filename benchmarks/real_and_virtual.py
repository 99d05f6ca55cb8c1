"""Compare the accuracy of 4 real hosts and 4 virtual workers, by strategy and seed.

    python -m benchmarks.real_and_virtual [--seeds 3] [--rate 200mbit]

Real hosts train in a lab, virtual workers in one process. Both use `benchmarks/runs/
cifar_small.toml` with the learning rate that was best in the studies. The output has a line for
each pair, then a line for each strategy. A strategy holds if the two means differ by at most the
standard deviation over seeds.
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
from stretto.studies.priced_run import parse_strategy_spec
from stretto.studies.scaling_runs import RunTemplate, run_cell
from stretto.studies.scaling_sweep import GridCell, StudyPoint
from stretto.telemetry.events import EvalDone, from_record

RUN = "benchmarks/runs/cifar_small.toml"
HOSTS, FACTOR = 4, 2.0
STRATEGIES = ("allreduce", "crossover", "crossover:delay=1", "sgp:delay=1")


def main() -> int:
    """Run all trainings and keep a record; return 1 if some strategy does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--alone", dest="unrecorded", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.unrecorded:
        return compare(args.seeds, args.rate)
    options = ["--seeds", str(args.seeds), "--rate", args.rate, "--alone"]
    command = ["python", "-m", "benchmarks.real_and_virtual", *options]
    return record(f"real_and_virtual_{args.rate}", command)[0]


def compare(seeds: int, rate: str) -> int:
    """Print every pair and the result of each strategy; return 1 if one does not hold."""
    failed = 0
    for strategy in STRATEGIES:
        pairs = []
        for seed in range(seeds):
            pair = {"real": real(strategy, seed, rate), "virtual": virtual(strategy, seed)}
            print(json.dumps({"strategy": strategy, "seed": seed, **pair}), flush=True)
            pairs.append((pair["real"], pair["virtual"]))
        means = [statistics.fmean(one) for one in zip(*pairs, strict=True)]
        spread = max(statistics.stdev(one) for one in zip(*pairs, strict=True))
        holds = abs(means[0] - means[1]) <= spread
        failed += not holds
        row = {"real_mean": means[0], "virtual_mean": means[1], "spread": spread, "holds": holds}
        print(json.dumps({"strategy": strategy, **row}), flush=True)
    return 1 if failed else 0


def real(strategy: str, seed: int, rate: str) -> float:
    """Return the final accuracy of training on the hosts of a lab."""
    kind, options = parse_strategy_spec(strategy)
    with tempfile.TemporaryDirectory() as folder:
        run = [f"run.folder={folder}", "run.name=real", f"run.seed={seed}"]
        lr = f"optim.lr={settings().optim.lr * FACTOR!r}"
        train = ["stretto", "train", RUN, *run, f"strategy.kind={kind}", *options, lr]
        lab = ["stretto", "lab", "--hosts", str(HOSTS), "--rate", rate, "--", *train]
        done = subprocess.run(lab, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        return last_accuracy(Path(folder) / "real" / "events.jsonl")


def last_accuracy(events: Path) -> float:
    """Return the accuracy of the last evaluation of a run."""
    lines = events.read_text(encoding="utf-8").splitlines()
    records = [from_record(json.loads(line)) for line in lines]
    *_, last = (event for event in records if isinstance(event, EvalDone))
    assert last.accuracy is not None
    return last.accuracy


def virtual(strategy: str, seed: int) -> float:
    """Return the final accuracy of virtual workers."""
    return run_cell(
        RunTemplate(RUN),
        GridCell(StudyPoint(strategy, HOSTS, settings().train.batch), FACTOR, seed),
    ).accuracy


def settings() -> RunConfig:
    """Return the settings of the run file."""
    return load_run(Path(RUN), []).config


if __name__ == "__main__":
    sys.exit(main())
