"""``stretto demo``: train one small model with one and with several workers and compare."""

import sys
from pathlib import Path


def demo(
    folder: Path = Path("runs/demo"), *, workers: int = 4, strategies: str = "allreduce,crossover"
) -> int:
    """Train one small model with 1 and with 4 workers on this machine, and show that they agree.

    Parameters
    ----------
    folder
        The folder of the runs and the report; runs of an earlier demo are replaced.
    workers
        Number of workers of the runs with several.
    strategies
        Strategies of these runs, separated by commas.
    """
    from stretto.errors import ConfigError
    from stretto.studies.demo import run_demo, summarize_comparisons

    if workers < 2:
        raise ConfigError(f"--workers {workers}: expected at least 2, to compare with 1")
    found = run_demo(folder, workers, [word.strip() for word in strategies.split(",")], _say)
    print(summarize_comparisons(found))
    print(f"report: {folder / 'report.html'}")
    return 0 if all(one.is_as_expected for one in found) else 1


def _say(line: str) -> None:
    print(f"stretto demo: {line}", file=sys.stderr)
