"""``stretto demo``: the main job on the embedded default."""

import sys
from pathlib import Path


def demo(
    folder: Path = Path("runs/demo"), *, workers: int = 4, strategies: str = "allreduce,crossover"
) -> int:
    """Train one small model with 1 and with 4 workers on this machine, and show that they agree.

    Parameters
    ----------
    folder
        Where runs and report go; the runs of an earlier demo there are replaced.
    workers
        Workers of the other runs.
    strategies
        How they agree, in turn: crossover is one word away from allreduce.
    """
    from stretto.errors import ConfigError
    from stretto.study.demo import run_demo, verdict

    if workers < 2:
        raise ConfigError(f"--workers {workers}: expected at least 2, to compare with 1")
    found = run_demo(folder, workers, [word.strip() for word in strategies.split(",")], _say)
    print(verdict(found))
    print(f"report: {folder / 'report.html'}")
    return 0 if all(one.holds for one in found) else 1


def _say(line: str) -> None:
    print(f"stretto demo: {line}", file=sys.stderr)
