"""``stretto calibrate``: measure links and algorithms and write a cluster's description."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.bench.calibrate import Calibration


def calibrate(
    *,
    out: Path = Path("cluster.toml"),
    table: bool = True,
    runs: int = 5,
    device: str = "cpu",
    json_: bool = False,
) -> int:
    """Measure what messages, additions and algorithms cost on the ranks of this job.

    Example: stretto lab --hosts 2 --ranks-per-host 2 --rate 400mbit -- stretto calibrate

    Parameters
    ----------
    out
        The description; measurements are added to a file that exists.
    table
        Time the algorithms, too, for a table by message size.
    runs
        Interleaved repetitions of each algorithm; the median counts.
    device
        cpu (Gloo) or cuda (NCCL).
    json_
        One object a line on standard output: the rows of the table.
    """
    from stretto.bench.calibrate import CalibrationOptions
    from stretto.bench.calibrate import calibrate as measure
    from stretto.cluster.detect import detect_world
    from stretto.errors import ConfigError
    from stretto.simulator.cluster import load_cluster

    world = detect_world()
    if world.size < 2 or runs < 1:
        raise ConfigError(
            "calibrate needs at least 2 ranks and 1 run: start it as `stretto lab --hosts 4 --rate "
            "400mbit -- stretto calibrate`, or under torchrun"
        )
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: expected cpu (Gloo) or cuda (NCCL)")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}")
    existing = load_cluster(out) if out.exists() else None
    log_line = _say if world.rank == 0 else lambda _: None
    found = measure(world, existing, CalibrationOptions(runs, table, device), log_line)
    if world.rank == 0:
        found.cluster.write(out)
        _print(found, as_json=json_)
        _say(f"wrote {out}")
    return 0


def _print(found: "Calibration", *, as_json: bool) -> None:
    for row in found.rows:
        if as_json:
            facts = {"bytes": row.num_bytes, "algorithm": row.word, "seconds": row.seconds}
            print(json.dumps({**facts, "reason": row.reason}))
        else:
            print(f"{row.word:<26}{row.reason}")
    if not as_json:
        print(found.cluster.to_toml())


def _say(line: str) -> None:
    print(f"stretto calibrate: {line}", file=sys.stderr)
