"""``stretto demo``: the main job on the embedded default."""

import shutil
import sys
from pathlib import Path

from stretto.study.demo import run_demo, verdict


def demo(folder: Path = Path("runs/demo"), *, workers: int = 4) -> int:
    """Train one small model with 1 and with 4 workers on this machine, and show that they agree.

    Parameters
    ----------
    folder
        Where runs and report go; what an earlier demo left there is replaced.
    workers
        Workers of the second run.
    """
    if (folder / "demo.toml").exists():
        shutil.rmtree(folder)
    result = run_demo(folder, workers, _say)
    print(verdict(result))
    print(f"report: {folder / 'report.html'}")
    return 0 if result.learned_the_same else 1


def _say(line: str) -> None:
    print(f"stretto demo: {line}", file=sys.stderr)
