"""Compare splits of the memory by hand with the planner, which chooses the split itself.

    python -m benchmarks.split_curve [--shares 16] [--random 200] [--profiles NAME ...]
    python -m benchmarks.split_curve --record     also keeps a record, with a picture: curve.svg
    python -m benchmarks.split_curve --measure PROFILE RUN [table.key=value ...] [--rate 800mbit]
        [--shares 8] [--runs 7]                   steps measured in a lab of four hosts

The memory limit is the mean of two peaks: that of zero3 (prefetch 1, reduce_slots 1) and that of
zero2 (prefetch 1), both with a barrier. A split by hand reserves a share of the limit for keeping
parameters. Prints a JSON object per profile, with the step times of:

- the best plan for each share;
- the planner's plan, with its lower bound;
- the best preset that fits;
- random plans, the best and the median.

The exit status is 1 if the planner's plan is slower than any of these.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from benchmarks.profiles import profiles
from benchmarks.record import folder_of, record
from stretto.planner.heuristic_split import even_shares, random_plans_within, split_curve
from stretto.planner.memory import Footprints
from stretto.planner.planner import make_plan
from stretto.planner.presets import PresetOptions, preset_plan
from stretto.planner.profile import Profile
from stretto.planner.timing import time_plan
from stretto.renamed import with_old_keys
from stretto.report.figures import OTHER, PALETTE

NAME = "split_curve"
SEED = 0
SAME = 1e-9
"""Relative difference up to which two step times count as equal."""
PRESETS = ("ddp", "dear", "zero2", "zero3")
WINDOWS = (1, 2, None)
"""Values of `prefetch` and `reduce_slots` that presets are tried with; None: all."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The results of one profile at its memory limit; seconds of a step, bytes of a rank."""

    profile: str
    memory_limit: int
    low: int
    high: int
    shares: list[int]
    split_s: list[float]
    sent_s: list[float]
    """Seconds that the link is busy, for the plan of each share."""
    waited_s: list[float]
    """Seconds that computation waits for messages, for the plan of each share."""
    planned_s: float
    bound_s: float
    how: str
    preset: str
    preset_s: float | None
    """None if no preset fits."""
    random_plans: int
    random_best_s: float
    random_median_s: float
    compute_s: float
    planner_took_s: float

    @property
    def holds(self) -> bool:
        """Whether no other plan is faster than the planner's."""
        others_s = [*self.split_s, self.random_best_s, self.preset_s or self.planned_s]
        return self.planned_s <= min(others_s) * (1 + SAME)


def main() -> int:
    """Compare profiles, or record and draw a comparison; return 1 if the planner is slower."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shares", type=int, default=16)
    parser.add_argument("--random", type=int, default=200)
    parser.add_argument("--profiles", nargs="+", default=list(profiles()))
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--measure", nargs="+", metavar="PROFILE, RUN, settings")
    parser.add_argument("--rate", default="800mbit")
    parser.add_argument("--runs", default="7")
    args = parser.parse_args()
    if args.measure:
        profile, run, *overrides = args.measure
        bench = [profile, *overrides, "--run", run, "--runs", args.runs]
        return measure(Path(run).stem, args.rate, [*bench, "--shares", str(args.shares)])
    asked = ["--shares", str(args.shares), "--random", str(args.random)]
    if args.record:
        return keep([*asked, "--profiles", *args.profiles])
    held = True
    for name in args.profiles:
        compared = compare(name, profiles()[name], args.shares, args.random)
        held = held and compared.holds
        result = with_old_keys({**asdict(compared), "holds": compared.holds})
        print(json.dumps(result), flush=True)
    return 0 if held else 1


def keep(arguments: Sequence[str]) -> int:
    """Record a comparison and write its picture into the folder of the record."""
    code, results = record(NAME, ["python", "-m", "benchmarks.split_curve", *arguments])
    folder = folder_of(NAME)
    (folder / "curve.svg").write_text(draw(results), encoding="utf-8")
    return code


def measure(run: str, rate: str, options: Sequence[str]) -> int:
    """Measure splits by hand in a lab, record them, and draw predicted and measured times."""
    name = f"split_{run}_{rate}"
    lab = ["stretto", "lab", "--hosts", "4", "--rate", rate, "--", "stretto", "bench", "plans"]
    code, rows = record(name, [*lab, *options, "--json"])
    if code == 0:
        predicted = as_panel(rows, "predicted_s", "predicted")
        panels = [predicted, as_panel(rows, "step_s", "measured")]
        (folder_of(name) / "curve.svg").write_text(draw(panels), encoding="utf-8")
    return code


def as_panel(rows: Sequence[dict[str, Any]], key: str, title: str) -> dict[str, Any]:
    """Return the input of `panel`: the times ``key`` of rows of `stretto bench plans --shares`."""
    planned = next(row for row in rows if row["name"].startswith("planned"))
    splits = [row for row in rows if row["name"].startswith("split")]
    limit = planned["memory_limit"]
    return {
        "profile": title,
        "memory_limit": limit,
        "shares": [float(row["name"].split()[1].rstrip("%")) / 100 * limit for row in splits],
        "split_s": [row[key] for row in splits],
        "planned_s": planned[key],
    }


def preset_peaks(profile: Profile) -> tuple[int, int]:
    """Return the peak bytes of zero3 and of zero2, each with a barrier and one unit ahead."""
    footprints, shapes = Footprints(profile), profile.shapes
    zero3 = preset_plan("zero3", shapes, PresetOptions(1, 1, barrier=True))
    zero2 = preset_plan("zero2", shapes, PresetOptions(1, barrier=True))
    return footprints.peak(zero3), footprints.peak(zero2)


def compare(name: str, profile: Profile, num_shares: int, num_random: int) -> Compared:
    """Plan one profile by hand splits, the planner, presets and at random."""
    low, high = preset_peaks(profile)
    limit = (low + high) // 2
    began_s = time.monotonic()
    planned = make_plan(profile, limit)
    took_s = time.monotonic() - began_s
    points = split_curve(profile, limit, even_shares(profile, limit, num_shares))
    preset, preset_s = best_preset(profile, limit)
    drawn = [one.step_s for one in random_plans_within(profile, limit, num_random, SEED)]
    return Compared(
        profile=name,
        memory_limit=limit,
        low=low,
        high=high,
        shares=[point.share_bytes for point in points],
        split_s=[point.step_s for point in points],
        sent_s=[profile.link_s(point.plan) for point in points],
        waited_s=[time_plan(point.plan, profile).waited_s for point in points],
        planned_s=planned.step_s,
        bound_s=planned.bound_s,
        how=planned.how,
        preset=preset,
        preset_s=preset_s,
        random_plans=len(drawn),
        random_best_s=min(drawn),
        random_median_s=statistics.median(drawn),
        compute_s=profile.compute_s,
        planner_took_s=round(took_s, 3),
    )


def best_preset(profile: Profile, limit: int) -> tuple[str, float | None]:
    """Return the fastest preset that fits, with its step time; None as the time if none fits."""
    footprints = Footprints(profile)
    tried: list[tuple[float, str]] = []
    for name in PRESETS:
        for ahead in WINDOWS:
            for slots in WINDOWS:
                plan = preset_plan(name, profile.shapes, PresetOptions(ahead, slots))
                if footprints.peak(plan) <= limit:
                    label = f"{name}, prefetch {ahead or 'all'}, reduce_slots {slots or 'all'}"
                    tried.append((time_plan(plan, profile).step_s, label))
    best_s, label = min(tried, default=(None, "none fits"))
    return label, best_s


WIDTH, HEIGHT = 460, 340
LEFT, RIGHT, TOP, BOTTOM = 58, 24, 98, 42
INK = "#1b2430"


class Axis(NamedTuple):
    """A linear scale from values to coordinates of a picture."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the coordinate of a value."""
        fraction = (value - self.low) / ((self.high - self.low) or 1.0)
        return round(self.start + fraction * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[float]:
        """Five evenly spaced values."""
        return [self.low + i * (self.high - self.low) / 4 for i in range(5)]


def draw(results: Sequence[dict[str, Any]]) -> str:
    """Return an SVG picture with a panel for each profile."""
    panels = [
        f'<g transform="translate({i % 2 * WIDTH},{i // 2 * HEIGHT})">{"".join(panel(one))}</g>'
        for i, one in enumerate(results)
    ]
    width, height = 2 * WIDTH, -(-len(results) // 2) * HEIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="system-ui, sans-serif" font-size="11" fill="{INK}">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *panels,
            "</svg>\n",
        ]
    )


def panel(one: dict[str, Any]) -> Iterable[str]:
    """Yield the elements of one profile's panel."""
    steps_ms = [step_s * 1e3 for step_s in one["split_s"]]
    levels = {"planned": one["planned_s"] * 1e3}
    for name, key in (("bound", "bound_s"), ("best preset", "preset_s")):
        if one.get(key) is not None:
            levels[name] = one[key] * 1e3
    highest, lowest = max(steps_ms), min(*steps_ms, *levels.values())
    margin = 0.06 * (highest - lowest)
    unit, size = unit_of(one["memory_limit"])
    x = Axis(one["shares"][0] / size, one["memory_limit"] / size, LEFT, WIDTH - RIGHT)
    y = Axis(lowest - margin, highest + margin, HEIGHT - BOTTOM, TOP)
    yield from heading(one, levels)
    yield from axes(x, y, unit)
    for (name, value), colour in zip(levels.items(), (PALETTE[1], OTHER, PALETTE[2]), strict=False):
        if value <= y.high:
            yield level(name, value, colour, x, y)
    points = [(x.at(s / size), y.at(ms)) for s, ms in zip(one["shares"], steps_ms, strict=True)]
    path = " ".join(f"{px},{py}" for px, py in points)
    yield f'<polyline points="{path}" fill="none" stroke="{PALETTE[0]}" stroke-width="2"/>'
    for px, py in points:
        yield f'<circle cx="{px}" cy="{py}" r="3" fill="{PALETTE[0]}"/>'


def heading(one: dict[str, Any], levels: dict[str, float]) -> Iterable[str]:
    """Yield the title of a panel and its values as text, also those off its scale."""
    unit, size = unit_of(one["memory_limit"])
    title = f"{one['profile']}: {one['memory_limit'] / size:.2f} {unit} a rank"
    lines = [
        f"split by hand: best {min(one['split_s']) * 1e3:.1f} ms",
        ", ".join(f"{name} {value:.1f} ms" for name, value in levels.items()),
    ]
    if "random_plans" in one:
        best, median = one["random_best_s"] * 1e3, one["random_median_s"] * 1e3
        lines.append(
            f"{one['random_plans']} random plans: best {best:.1f} ms, median {median:.1f} ms"
        )
    yield f'<text x="{LEFT}" y="20" font-size="14" font-weight="600">{escape(title)}</text>'
    for index, line in enumerate(lines):
        yield _text(LEFT, 38 + 15 * index, line, "start")


def unit_of(num_bytes: float) -> tuple[str, float]:
    """Return a unit that suits this many bytes, and its size in bytes."""
    return ("GB", 1e9) if num_bytes >= 1e9 else ("MB", 1e6)


def axes(x: Axis, y: Axis, unit: str) -> Iterable[str]:
    """Yield the lines and labels of both axes."""
    digits = 2 if x.high - x.low < 2 else 1
    for value in x.ticks:
        yield _text(x.at(value), HEIGHT - BOTTOM + 16, f"{value:.{digits}f}", "middle")
    for value in y.ticks:
        yield _text(LEFT - 6, y.at(value) + 4, f"{value:.4g}", "end")
        yield f'<path d="M{LEFT} {y.at(value)}H{WIDTH - RIGHT}" stroke="#e4e8ee"/>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield _text(middle, HEIGHT - 10, f"{unit} of the limit for keeping parameters", "middle")
    yield _text(4, TOP - 10, "ms a step", "start")


def level(name: str, value: float, colour: str, x: Axis, y: Axis) -> str:
    """Return a dashed horizontal line with its name."""
    line = f'<path d="M{x.start} {y.at(value)}H{x.end}" stroke="{colour}" stroke-width="1.5" '
    # The bound may lie just below the plan, so their labels are at different ends.
    label_x, anchor = (x.start, "start") if name == "bound" else (x.end, "end")
    label = f'<g fill="{colour}">{_text(label_x, y.at(value) - 4, name, anchor)}</g>'
    return f'{line}stroke-dasharray="6 4"/>{label}'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    sys.exit(main())
