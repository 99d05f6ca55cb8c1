"""Compare collectives in a lab with Gloo and the lower bound, and print which claims hold.

python benchmarks/collectives.py            all of it, about a quarter of an hour
python benchmarks/collectives.py flat step  some of it
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from record import record

BENCH = ["stretto", "bench", "collectives", "--json"]
Rows = list[dict[str, object]]
Claim = tuple[str, float, float]
"""(description, measured figure, upper limit)"""


def lab(hosts: int, per_host: int, rate: str, *command: str) -> list[str]:
    """Return the command that runs ``command`` as every rank of a lab."""
    shape = ["--hosts", str(hosts), "--ranks-per-host", str(per_host), "--rate", rate]
    return ["stretto", "lab", *shape, "--", *command]


def flat() -> Iterator[Claim]:
    """4 hosts, 1 KB to 64 MB: the best algorithm against Gloo and the bound; the hybrid table."""
    with described(4, 1, "400mbit") as cluster:
        algorithms = "hybrid,ring,ring/2,ring/4,doubling,halving-doubling"
        algorithms += ",binary-blocks,torus/2,torus/4,hierarchical-halving/4,native"
        command = [*BENCH, "--runs", "7", "--cluster", str(cluster), "--algorithms", algorithms]
        rows = run("collectives_4x1_400mbit", lab(4, 1, "400mbit", *command))
    for size, of_size in by_size(rows).items():
        ours = min(seconds(row) for word, row in of_size.items() if word != "hybrid")
        row = next(iter(of_size.values()))
        ratio = ours / float(str(row["peer_s"]))
        if size <= 16_000:
            yield f"{size} B: best of ours / gloo", ratio, 1 / 4
        if size >= 256_000:
            yield f"{size} B: best of ours / gloo", ratio, 1.05
        if size >= 4_000_000:
            yield f"{size} B: best of ours / bound", ours / float(str(row["bound_s"])), 1.15
        yield f"{size} B: hybrid / best single", seconds(of_size["hybrid"]) / ours, 1.10


def hosts() -> Iterator[Claim]:
    """Several ranks a host, 32 MB: the hierarchical algorithms against Gloo."""
    for num, per_host, allowed in ((2, 4, 1 / 1.60), (4, 2, 1 / 1.10)):
        algorithms = "hierarchical/8,hierarchical/16,hierarchical-doubling/8,hierarchical-halving/8"
        command = [*BENCH, "--runs", "7", "--sizes", "32MB", "--algorithms", algorithms]
        name = f"collectives_{num}x{per_host}_400mbit"
        rows = run(name, lab(num, per_host, "400mbit", *command))
        best = min(rows, key=seconds)
        yield f"{best['case']} / gloo", seconds(best) / float(str(best["peer_s"])), allowed


def hybrid() -> Iterator[Claim]:
    """2 x 4 ranks, 1 KB to 64 MB: the calibrated table against every promising algorithm."""
    with described(2, 4, "400mbit") as cluster:
        command = [
            *BENCH,
            "--runs",
            "5",
            "--cluster",
            str(cluster),
            "--algorithms",
            "hybrid,likely",
        ]
        rows = run("hybrid_2x4_400mbit", lab(2, 4, "400mbit", *command))
    for size, of_size in by_size(rows).items():
        best = min(seconds(row) for word, row in of_size.items() if word != "hybrid")
        yield f"{size} B: hybrid / best single", seconds(of_size["hybrid"]) / best, 1.10


def others() -> Iterator[Claim]:
    """Reduce-scatter against Gloo's own, and a bf16 wire against fp32."""
    scatter = [*BENCH, "--collective", "reduce-scatter", "--sizes", "16MB", "--runs", "7"]
    algorithms = ["--algorithms", "ring,ring/2,ring/4,halving"]
    rows = run("reduce_scatter_4x1_400mbit", lab(4, 1, "400mbit", *scatter, *algorithms))
    best = min(rows, key=seconds)
    yield f"{best['case']} / gloo", seconds(best) / float(str(best["peer_s"])), 1 / 1.9
    times = {}
    for wire in ("own", "bf16"):
        command = [*BENCH, "--sizes", "32MB", "--runs", "5", "--wire", wire]
        command += ["--algorithms", "ring/4,native,halving-doubling"]
        rows = run(f"wire_{wire}_4x1_400mbit", lab(4, 1, "400mbit", *command))
        times[wire] = min(seconds(row) for row in rows)
    yield "32 MB, bf16 / fp32 on the wire", times["bf16"] / times["own"], 0.6


def step() -> Iterator[Claim]:
    """A training step on 2 x 4 ranks at 200 Mbit/s: the calibrated hybrid against tuned DDP."""
    with described(2, 4, "200mbit", "--no-table") as cluster:
        command = ["stretto", "bench", "step", "--runs", "5", "--json"]
        command += [f"strategy.cluster={cluster}"]
        rows = run("step_2x4_200mbit", lab(2, 4, "200mbit", *command))
    tuned = next(row for row in rows if str(row["peer"]).endswith("(tuned)"))
    yield f"step / {tuned['peer']}", seconds(tuned) / float(str(tuned["peer_s"])), 0.75


class described:  # noqa: N801 - used as a with statement
    """Calibrates the lab; yields the cluster description, which is kept with the records."""

    def __init__(self, hosts: int, per_host: int, rate: str, *more: str) -> None:
        self._more = more
        self._folder = tempfile.TemporaryDirectory()
        self._lab = (hosts, per_host, rate)

    def __enter__(self) -> Path:
        path = Path(self._folder.name) / "cluster.toml"
        hosts, per_host, rate = self._lab
        name = f"calibrate_{hosts}x{per_host}_{rate}"
        command = ["stretto", "calibrate", "--json", "--out", str(path), *self._more]
        run(name, lab(*self._lab, *command))
        return path

    def __exit__(self, *_failure: object) -> None:
        self._folder.cleanup()


def run(name: str, command: list[str]) -> Rows:
    """Record ``command``; exit if it fails."""
    code, rows = record(name, command)
    if code:
        sys.exit(code)
    return rows


def seconds(row: dict[str, object]) -> float:
    """Return the time of our own algorithm."""
    return float(str(row["ours_s"]))


def by_size(rows: Rows) -> dict[int, dict[str, dict[str, object]]]:
    """Return rows by bytes, then by algorithm."""
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    sizes: dict[int, dict[str, dict[str, object]]] = {}
    for row in rows:
        what, _shape, word = str(row["case"]).split(", ")
        number, unit = what.split()[1:3]
        sizes.setdefault(round(float(number) * units[unit]), {})[word] = row
    return sizes


PARTS: dict[str, Callable[[], Iterator[Claim]]] = {
    "flat": flat,
    "hosts": hosts,
    "hybrid": hybrid,
    "others": others,
    "step": step,
}


def main() -> int:
    """Run the named parts, or all; return 1 if a claim does not hold."""
    broken = 0
    claims = [claim for name in sys.argv[1:] or PARTS for claim in PARTS[name]()]
    for what, figure, most in claims:
        held = figure <= most
        broken += not held
        print(f"{what}: {figure:.3f} ({'holds' if held else 'BROKEN'}: at most {most:.3f})")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
