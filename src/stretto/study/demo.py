"""The main job on the embedded default: one model, trained by 1 worker and, in turn, by 4."""

import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.config import load, to_toml
from stretto.errors import ConfigError, LaunchError
from stretto.launch.local import run_here
from stretto.recipes.demo import demo
from stretto.report.html import write_report
from stretto.report.records import RunRecord, ended, load_run, moments
from stretto.run import RunConfig
from stretto.study.words import strategy_word

_EXACT = ("allreduce", "sharded")
"""Strategies whose every step is that of one worker, but for rounding."""


@dataclass(frozen=True, slots=True)
class Together:
    """A run of several workers, beside that of one."""

    strategy: str
    workers: int
    record: RunRecord
    largest_gap: float
    """Largest difference of the logged losses, as a share of the loss."""
    accuracies: tuple[float, float]
    """Of one worker, and of these."""
    seconds: tuple[float, float]

    @property
    def is_exact(self) -> bool:
        """Whether its every step is that of one worker; else workers have models of their own."""
        return self.strategy.partition(":")[0] in _EXACT

    @property
    def holds(self) -> bool:
        """Say whether the run came to what its strategy promises.

        Exact ones learn the same: curves stay together, but for rounding. Models that are workers'
        own take other steps on their way, and end somewhat below at the same rate.
        """
        alone, here = self.accuracies
        if self.is_exact:
            return self.largest_gap < 0.1 and abs(alone - here) < 0.05
        return here > alone - 0.1


def run_demo(
    folder: Path, workers: int, strategies: Sequence[str], say: Callable[[str], None]
) -> list[Together]:
    """Train and compare; everything lies in ``folder`` afterwards, the report included.

    Raises:
        ConfigError: There is no such strategy, or no such folder can be made.
    """
    settings = {word: strategy_word(word) for word in strategies}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ConfigError(f"folder {folder} cannot be made: {failure.strerror}") from failure
    run_file = folder / "demo.toml"
    run_file.write_text(to_toml(load(RunConfig, None, recipe=demo())))
    say("training with 1 worker")
    alone = _train(run_file, "1-worker", 1, [], say)
    found = []
    for word, (kind, more) in settings.items():
        say(f"training the same model, the same data, with {workers} workers: {word}")
        name = f"{workers}-workers-{re.sub(r'[^a-z0-9_]+', '-', word)}"
        record = _train(run_file, name, workers, [f"strategy.kind={kind}", *more], say)
        found.append(compare(alone, record, word, workers))
    title = "Stretto demo"
    write_report(folder / "report.html", title, verdict(found), [alone, *(t.record for t in found)])
    return found


def _train(
    run_file: Path, name: str, workers: int, how: Sequence[str], say: Callable[[str], None]
) -> RunRecord:
    folder = run_file.parent
    # Only what an earlier demo wrote, and known by its resolved config: nobody else's files.
    if (folder / name / "resolved.toml").exists():
        shutil.rmtree(folder / name)
    settings = [f"run.name={name}", f"run.folder={folder}", *how]
    logs = folder / name / "logs"
    outcome = run_here(["train", str(run_file), *settings], workers, logs=logs, say=say)
    if outcome.exit_code:
        raise LaunchError(outcome.reason)
    return load_run(folder / name)


def compare(alone: RunRecord, together: RunRecord, strategy: str, workers: int) -> Together:
    """Lay a run of several workers beside that of one."""
    theirs = {moment.step.step: moment.step.loss for moment in moments(together)}
    gaps = [
        abs(m.step.loss - theirs[m.step.step]) / m.step.loss
        for m in moments(alone)
        if m.step.step in theirs
    ]
    ends = [ended(alone), ended(together)]
    accuracies = [e.accuracy if e and e.accuracy is not None else math.nan for e in ends]
    seconds = [e.seconds if e else math.nan for e in ends]
    return Together(
        strategy,
        workers,
        together,
        max(gaps, default=math.inf),
        (accuracies[0], accuracies[1]),
        (seconds[0], seconds[1]),
    )


def verdict(found: Sequence[Together]) -> str:
    """Return what was seen, a sentence for each strategy."""
    return " ".join(_sentence(one) for one in found)


def _sentence(one: Together) -> str:
    alone, together = one.accuracies
    who = f"1 worker and {one.workers} workers ({one.strategy})"
    ends = f"end at {alone:.1%} and {together:.1%} accuracy"
    took = f"after {one.seconds[0]:.1f} s and {one.seconds[1]:.1f} s"
    if not one.is_exact:
        near = "came near each other" if one.holds else "did NOT come near each other"
        return f"{who}, each with a model of its own, {near}: they {ends}, {took}."
    same = "learned the same" if one.holds else "did NOT learn the same"
    gap = f"their losses never differ by more than {one.largest_gap:.1%}"
    return f"{who} {same}: {gap}, and they {ends}, {took}."
