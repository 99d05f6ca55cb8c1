"""``stretto demo``: the main job on the embedded default."""

import sys
from pathlib import Path


def demo(folder: Path = Path("runs/demo"), *, workers: int = 4) -> int:
    """Train one small model with 1 and with 4 workers on this machine, and show that they agree.

    Parameters
    ----------
    folder
        Where runs and report go; the runs of an earlier demo there are replaced.
    workers
        Workers of the second run.
    """
    from stretto.errors import ConfigError
    from stretto.study.demo import run_demo, verdict

    if workers < 2:
        raise ConfigError(f"--workers {workers}: expected at least 2, to compare with 1")
    result = run_demo(folder, workers, _say)
    print(verdict(result))
    print(f"report: {folder / 'report.html'}")
    return 0 if result.learned_the_same else 1


def _say(line: str) -> None:
    print(f"stretto demo: {line}", file=sys.stderr)
