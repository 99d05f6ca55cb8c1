"""The main job on the embedded default: one model, trained by 1 and by 4 workers."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stretto.config import load, to_toml
from stretto.errors import ConfigError, LaunchError
from stretto.launch.local import run_here
from stretto.recipes.demo import demo
from stretto.report.html import write_report
from stretto.report.records import RunRecord, ended, load_run, moments, started
from stretto.run import RunConfig


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of one model, beside each other."""

    alone: RunRecord
    together: RunRecord
    largest_gap: float
    """Largest difference of the logged losses, as a share of the loss."""
    accuracies: tuple[float, float]
    seconds: tuple[float, float]

    @property
    def learned_the_same(self) -> bool:
        """Say whether the curves stay together; rounding alone moves them apart a little."""
        alone, together = self.accuracies
        return self.largest_gap < 0.1 and abs(alone - together) < 0.05


def run_demo(folder: Path, workers: int, say: Callable[[str], None]) -> Comparison:
    """Train twice and compare; everything lies in ``folder`` afterwards, the report included."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ConfigError(f"folder {folder} cannot be made: {failure.strerror}") from failure
    run_file = folder / "demo.toml"
    run_file.write_text(to_toml(load(RunConfig, None, recipe=demo())))
    for name, count in (("1-worker", 1), (f"{workers}-workers", workers)):
        # Only what an earlier demo wrote, and known by its resolved config: nobody else's files.
        if (folder / name / "resolved.toml").exists():
            shutil.rmtree(folder / name)
        say(f"training the same model, the same data, with {count} worker{'s' * (count > 1)}")
        settings = [f"run.name={name}", f"run.folder={folder}"]
        logs = folder / name / "logs"
        outcome = run_here(["train", str(run_file), *settings], count, logs=logs, say=say)
        if outcome.exit_code:
            raise LaunchError(outcome.reason)
    result = compare(load_run(folder / "1-worker"), load_run(folder / f"{workers}-workers"))
    write_report(folder / "report.html", "Stretto demo", verdict(result), _both(result))
    return result


def compare(alone: RunRecord, together: RunRecord) -> Comparison:
    """Lay two runs beside each other."""
    theirs = {moment.step.step: moment.step.loss for moment in moments(together)}
    gaps = [
        abs(m.step.loss - theirs[m.step.step]) / m.step.loss
        for m in moments(alone)
        if m.step.step in theirs
    ]
    ends = [ended(alone), ended(together)]
    accuracies = [e.accuracy if e and e.accuracy is not None else math.nan for e in ends]
    seconds = [e.seconds if e else math.nan for e in ends]
    return Comparison(
        alone,
        together,
        max(gaps, default=math.inf),
        (accuracies[0], accuracies[1]),
        (seconds[0], seconds[1]),
    )


def verdict(result: Comparison) -> str:
    """Return what was seen, in a sentence."""
    start = started(result.together)
    workers = start.workers if start else "several"
    same = "learned the same" if result.learned_the_same else "did NOT learn the same"
    alone, together = result.accuracies
    return (
        f"1 worker and {workers} workers {same}: their losses never differ by more than "
        f"{result.largest_gap:.1%}, and they end at {alone:.1%} and {together:.1%} accuracy, after "
        f"{result.seconds[0]:.1f} s and {result.seconds[1]:.1f} s."
    )


def _both(result: Comparison) -> list[RunRecord]:
    return [result.alone, result.together]
