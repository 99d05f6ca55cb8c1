"""Compare predicted with measured times of collectives, on shapes that were not calibrated.

    python benchmarks/prices.py            measures, some 20 minutes
    python benchmarks/prices.py --again    compares the newest records with the current model

The prediction is calibrated on 2 x 2 and 4 x 1 ranks, and tested on 2 x 4 and 3 x 2. Every
algorithm is measured in one part and in the best predicted number of parts, at 1, 8 and 32 MB. The
limits are for 8 and 32 MB; 1 MB is only reported.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from collectives import by_size, lab, run, seconds

from stretto.cluster.world import Mesh
from stretto.collectives.algorithm_table import parse_table
from stretto.simulator.algorithm_choice import choose_table
from stretto.simulator.cluster import Cluster, load_cluster
from stretto.simulator.price import price

RATE = "400mbit"
SHAPES = ((2, 4), (3, 2))
BENCH = ["stretto", "bench", "collectives", "--json", "--sizes", "1MB,8MB,32MB", "--runs", "5"]
MEAN, WORST, PICKED = 0.15, 0.30, 1.10


def main() -> int:
    """Calibrate, measure and compare; return 1 if a limit is exceeded."""
    again = sys.argv[1:] == ["--again"]
    if not again:
        calibrate()
    description = newest("prices_calibrate_4x1") / "cluster.toml"
    cluster = load_cluster(description)
    errors: dict[int, list[float]] = {}
    picks: list[float] = []
    for hosts, per_host in SHAPES:
        mesh = Mesh((per_host,) * hosts)
        name = f"prices_{mesh.shape}_{RATE}"
        if not again:
            command = [*BENCH, "--cluster", str(description), "--algorithms", "all"]
            run(name, lab(hosts, per_host, RATE, *command))
        lines = (newest(name) / "result.jsonl").read_text().splitlines()
        for size, of_size in by_size([json.loads(line) for line in lines]).items():
            compared = compare(cluster.with_mesh(mesh), size, of_size)
            errors.setdefault(size, []).extend(compared.values())
            picks.append(picked(cluster, mesh, size, of_size)) if size > 1_000_000 else None
    return report(errors, picks)


def calibrate() -> None:
    """Calibrate small labs, and keep the cluster description with the records."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        for hosts, per_host in ((2, 2), (4, 1)):
            command = ["stretto", "calibrate", "--no-table", "--out", str(path), "--json"]
            run(f"prices_calibrate_{hosts}x{per_host}", lab(hosts, per_host, RATE, *command))
        (newest("prices_calibrate_4x1") / "cluster.toml").write_text(path.read_text())


def newest(name: str) -> Path:
    """Return the folder of the newest record of that name."""
    return max(Path(__file__).with_name("records").glob(f"????-??-??_{name}"))


def compare(cluster: Cluster, size: int, of_size: dict[str, dict[str, object]]) -> dict[str, float]:
    """Return the relative error of each prediction, and print both figures."""
    errors = {}
    for word, row in of_size.items():
        schedule = parse_table(word).pick(0).schedule(cluster.mesh)
        predicted = price(schedule, size, cluster).seconds
        errors[word] = predicted / seconds(row) - 1
        facts = {"shape": cluster.mesh.shape, "bytes": size, "algorithm": word}
        facts |= {"predicted_s": predicted, "measured_s": seconds(row), "error": errors[word]}
        print(json.dumps(facts))
    return errors


def picked(cluster: Cluster, mesh: Mesh, size: int, of_size: dict[str, dict[str, object]]) -> float:
    """Return the measured time of the picked algorithm, relative to the best measured one."""
    best = min(seconds(row) for row in of_size.values())
    choice = choose_table(cluster, mesh).pick(size)
    named = of_size.get(choice.word)
    if named is None:  # measured with other parts only: take the best of the same name
        same = [row for word, row in of_size.items() if word.partition("/")[0] == choice.name]
        named = min(same, key=seconds)
    print(f"{mesh.shape}, {size} B: prices pick {choice.word}: {seconds(named) / best:.3f} x best")
    return seconds(named) / best


def report(errors: dict[int, list[float]], picks: list[float]) -> int:
    """Print the errors; return 1 if a limit is exceeded."""
    for size, values in errors.items():
        far = max(values, key=abs)
        print(f"{size} B: mean {statistics.fmean(map(abs, values)):.1%}, worst {far:+.1%}")
    counted = [
        abs(error) for size, values in errors.items() if size > 1_000_000 for error in values
    ]
    mean, worst = statistics.fmean(counted), max(counted)
    held = mean <= MEAN and worst <= WORST and max(picks) <= PICKED
    print(
        f"8 and 32 MB: mean {mean:.1%} (at most {MEAN:.0%}), worst {worst:.1%} (at most "
        f"{WORST:.0%}), picked {max(picks):.3f} x best (at most {PICKED}): "
        f"{'holds' if held else 'BROKEN'}"
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
