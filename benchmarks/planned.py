"""Compare planned sharding with presets and FSDP2 at equal memory, in a lab or on one GPU.

    python benchmarks/planned.py [vgg gpt resnet] [--rate 800mbit] [--runs 5] [--batch 24]
    python benchmarks/planned.py --gpu [vgg_gpu gpt_gpu gpt2_gpu vit_gpu]   two NCCL ranks

First a profile of each run in `benchmarks/runs` is measured. Then plans for three memory limits are
timed, interleaved with the presets and FSDP2. Both keep a record. The output has a line per limit,
with the time of the planned step relative to others: the predicted time, the best preset that fits,
FSDP2 with no more memory, and dear.

In a lab, the first line is the time that zero2 keeps a link busy, relative to the computation.
Planning can help if that ratio is between 0.5 and 2. If it is larger, the machine is too fast for
the batch of the run.
"""

import argparse
import sys
from typing import NamedTuple

from record import ROOT, folder_of, record

from stretto.planner.profile import Profile, read_profile
from stretto.units import parse_bits_per_s

HOSTS = 4
IN_LAB, ON_GPU = ["vgg", "gpt", "resnet"], ["vgg_gpu", "gpt_gpu", "gpt2_gpu", "vit_gpu"]
ONE_GPU = ["python3", "benchmarks/one_gpu.py", "--hosts", "2", "--", "python3", "-m", "stretto"]
Row = dict[str, object]


class Testbed(NamedTuple):
    """A lab or a GPU on which steps are measured."""

    name: str
    stretto: list[str]
    """The command that runs `stretto` as every rank of the testbed."""
    device: str
    bytes_per_s: float | None = None
    """The rate of a link; None if it is not limited."""


def lab_testbed(rate: str) -> Testbed:
    """Return a lab of four hosts with links of this rate."""
    lab = ["stretto", "lab", "--hosts", str(HOSTS), "--rate", rate, "--", "stretto"]
    return Testbed(rate, lab, "cpu", parse_bits_per_s(rate) / 8)


def main() -> int:
    """Measure all runs and keep records; return the largest exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rate", default="800mbit")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--runs", default="5")
    parser.add_argument("--batch", help="samples of a step, instead of the run's")
    args = parser.parse_args()
    testbed = Testbed("2x1", ONE_GPU, "cuda") if args.gpu else lab_testbed(args.rate)
    names = args.names or (ON_GPU if args.gpu else IN_LAB)
    overrides = [f"train.batch={args.batch}"] if args.batch else []
    return max([measure(name, testbed, args.runs, overrides) for name in names])


def measure(name: str, testbed: Testbed, runs: str, overrides: list[str]) -> int:
    """Measure one run on one testbed and print the ratios; return the exit code."""
    run, device = f"benchmarks/runs/{name}.toml", ["--device", testbed.device]
    first = f"profile_{name}_{testbed.name}"
    profile = str((folder_of(first) / "profile.json").relative_to(ROOT))
    code, _ = record(
        first, [*testbed.stretto, "profile", run, *overrides, *device, "--out", profile]
    )
    if code:
        return code
    options = [profile, *overrides, "--run", run, *device, "--runs", runs, "--json"]
    bench = [*testbed.stretto, "bench", "plans", *options]
    code, rows = record(f"planned_{name}_{testbed.name}", bench)
    if testbed.bytes_per_s is not None and rows:
        compute_s = number(rows[0], "step_s")
        busy_s = link_busy_s(read_profile(ROOT / profile), testbed.bytes_per_s)
        busy = f"the link is busy for {busy_s / compute_s:.2f} of computation"
        print(f"{name} at {testbed.name}: {busy}")
    for row in rows:
        if row["memory_limit"] is not None:
            print(f"{name} at {testbed.name}: {comparison(row, rows)}")
    return code


def link_busy_s(profile: Profile, bytes_per_s: float) -> float:
    """Return the least seconds that zero2's gradients and parameters keep a link busy."""
    ranks = profile.link.ranks
    widths = profile.parameter_bytes + profile.gradient_bytes
    numel = sum(unit.numel for unit in profile.units)
    return numel * widths * (ranks - 1) / ranks / bytes_per_s


def comparison(row: Row, rows: list[Row]) -> str:
    """Return a sentence that compares one planned step with the prediction, presets and FSDP2."""
    limit, step_s = number(row, "memory_limit"), number(row, "step_s")
    presets = [r for r in rows if r["predicted_bytes"] is not None and r["memory_limit"] is None]
    eager = [r for r in presets if r["name"] != "dear" and number(r, "predicted_bytes") <= limit]
    peers = [r for r in rows if str(r["name"]).startswith("fsdp2")]
    peers_that_fit = [r for r in peers if number(r, "live_bytes") <= limit]
    of_predicted = step_s / number(row, "predicted_s")
    parts = [f"{row['name']} {step_s * 1e3:.0f} ms, {of_predicted:.3f} of predicted"]
    for what, group in (("the best preset that fits", eager), ("fsdp2", peers_that_fit)):
        if group:
            best = min(group, key=lambda r: number(r, "step_s"))
            parts.append(f"{step_s / number(best, 'step_s'):.3f} of {what} ({best['name']})")
    dear = next(r for r in presets if r["name"] == "dear")
    if number(dear, "predicted_bytes") <= limit:
        parts.append(f"{step_s / number(dear, 'step_s'):.3f} of dear")
    return "; ".join(parts)


def number(row: Row, key: str) -> float:
    """Return the value of ``key`` in a row, as a float."""
    return float(str(row[key]))


if __name__ == "__main__":
    sys.exit(main())
