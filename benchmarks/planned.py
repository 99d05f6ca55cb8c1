"""Planned steps against presets and FSDP2 at equal memory, in a cluster in a box or on one GPU.

    python benchmarks/planned.py [vgg gpt resnet] [--rate 800mbit] [--runs 5] [--batch 24]
    python benchmarks/planned.py --gpu [vgg_gpu gpt_gpu gpt2_gpu vit_gpu]   two NCCL ranks

For each run of `benchmarks/runs` a profile is measured, then plans for three budgets are timed
beside everybody else, interleaved; both keep records. What is claimed of each budget is told:
ours over the best preset that fits, over FSDP2 with no more memory, and over what was predicted.
How long zero2 keeps a link busy, over how long a rank computes, is told first: between 0.5 and 2
there is something to plan, and a machine may be too fast for a run's batch.
"""

import argparse
import sys
from typing import NamedTuple

from record import ROOT, folder_of, record

from stretto.plan.profile import Profile, read_profile
from stretto.units import parse_bits_per_s

HOSTS = 4
IN_BOX, ON_GPU = ["vgg", "gpt", "resnet"], ["vgg_gpu", "gpt_gpu", "gpt2_gpu", "vit_gpu"]
ONE_GPU = ["python3", "benchmarks/one_gpu.py", "--hosts", "2", "--", "python3", "-m", "stretto"]
Row = dict[str, object]


class Place(NamedTuple):
    """Where steps are measured."""

    name: str
    stretto: list[str]
    """The command, as every rank of that place."""
    device: str
    bytes_per_s: float | None = None
    """Of a link, where it has a stated rate."""


def box(rate: str) -> Place:
    """Return four hosts with links of such a rate."""
    lab = ["stretto", "lab", "--hosts", str(HOSTS), "--rate", rate, "--", "stretto"]
    return Place(rate, lab, "cpu", parse_bits_per_s(rate) / 8)


def main() -> int:
    """Measure, keep the records, tell the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rate", default="800mbit")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--runs", default="5")
    parser.add_argument("--batch", help="samples of a step, instead of the run's")
    args = parser.parse_args()
    place = Place("2x1", ONE_GPU, "cuda") if args.gpu else box(args.rate)
    names = args.names or (ON_GPU if args.gpu else IN_BOX)
    overrides = [f"train.batch={args.batch}"] if args.batch else []
    return max([measure(name, place, args.runs, overrides) for name in names])


def measure(name: str, place: Place, runs: str, overrides: list[str]) -> int:
    """Measure one run in one place; return its exit code."""
    run, device = f"benchmarks/runs/{name}.toml", ["--device", place.device]
    first = f"profile_{name}_{place.name}"
    profile = str((folder_of(first) / "profile.json").relative_to(ROOT))
    code, _ = record(first, [*place.stretto, "profile", run, *overrides, *device, "--out", profile])
    if code:
        return code
    asked = [profile, *overrides, "--run", run, *device, "--runs", runs, "--json"]
    code, rows = record(f"planned_{name}_{place.name}", [*place.stretto, "bench", "plans", *asked])
    if place.bytes_per_s is not None and rows:
        alone_s = number(rows[0], "step_s")
        busy_s = busy(read_profile(ROOT / profile), place.bytes_per_s)
        print(f"{name} at {place.name}: the link is busy for {busy_s / alone_s:.2f} of computation")
    for row in rows:
        if row["budget"] is not None:
            print(f"{name} at {place.name}: {told(row, rows)}")
    return code


def busy(profile: Profile, bytes_per_s: float) -> float:
    """Return for how long zero2 keeps a link busy at least: each rank's part leaves twice."""
    ranks = profile.link.ranks
    widths = profile.parameter_bytes + profile.gradient_bytes
    numel = sum(unit.numel for unit in profile.units)
    return numel * widths * (ranks - 1) / ranks / bytes_per_s


def told(row: Row, rows: list[Row]) -> str:
    """Return what holds of one planned step, in words."""
    budget, step_s = number(row, "budget"), number(row, "step_s")
    others = [r for r in rows if r["told_bytes"] is not None and r["budget"] is None]
    eager = [r for r in others if r["name"] != "dear" and number(r, "told_bytes") <= budget]
    peers = [r for r in rows if str(r["name"]).startswith("fsdp2")]
    fitting = [r for r in peers if number(r, "live_bytes") <= budget]
    words = [f"{row['name']} {step_s * 1e3:.0f} ms, {step_s / number(row, 'told_s'):.3f} of told"]
    for what, field in (("the best preset that fits", eager), ("fsdp2", fitting)):
        if field:
            best = min(field, key=lambda r: number(r, "step_s"))
            words.append(f"{step_s / number(best, 'step_s'):.3f} of {what} ({best['name']})")
    dear = next(r for r in others if r["name"] == "dear")
    if number(dear, "told_bytes") <= budget:
        words.append(f"{step_s / number(dear, 'step_s'):.3f} of dear")
    return "; ".join(words)


def number(row: Row, key: str) -> float:
    """Return a figure of a row."""
    return float(str(row[key]))


if __name__ == "__main__":
    sys.exit(main())
