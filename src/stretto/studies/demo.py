"""The demo: train one model with 1 worker, then with several under each strategy, and compare."""

import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.config import load, to_toml
from stretto.errors import ConfigError, LaunchError
from stretto.launch.local_workers import run_local_workers
from stretto.recipes.small_runs import demo
from stretto.report.html import write_report
from stretto.report.run_records import RunRecord, last_end, load_run_record, logged_steps
from stretto.run import RunConfig
from stretto.studies.priced_run import parse_strategy_spec

_EXACT_STRATEGIES = ("allreduce", "sharded")
"""Strategies whose steps equal those of one worker up to rounding."""


@dataclass(frozen=True, slots=True)
class RunComparison:
    """A run of several workers compared with the run of one worker."""

    strategy: str
    workers: int
    record: RunRecord
    largest_gap: float
    """Largest difference of the logged losses, as a share of the loss of one worker."""
    accuracies: tuple[float, float]
    """The final accuracy with one worker, and with several."""
    seconds: tuple[float, float]
    """The running time with one worker, and with several."""

    @property
    def is_exact(self) -> bool:
        """Whether its steps equal those of one worker; otherwise the workers' replicas differ."""
        return self.strategy.partition(":")[0] in _EXACT_STRATEGIES

    @property
    def is_as_expected(self) -> bool:
        """Whether the result is what the strategy promises.

        With an exact strategy, loss curves agree up to rounding. Otherwise replicas differ during
        training, and the accuracy may end a little lower at the same learning rate.
        """
        baseline, accuracy = self.accuracies
        if self.is_exact:
            return self.largest_gap < 0.1 and abs(baseline - accuracy) < 0.05
        return accuracy > baseline - 0.1


def run_demo(
    folder: Path, workers: int, strategies: Sequence[str], log_line: Callable[[str], None]
) -> list[RunComparison]:
    """Train with 1 worker and with ``workers`` under each strategy; write all runs and a report.

    Args:
        folder: Where the runs and ``report.html`` are written.
        workers: The number of workers to compare with one.
        strategies: Strategies as on a command line: a kind, with settings behind it.
        log_line: Called with a line of progress.

    Raises:
        ConfigError: A strategy is unknown, or the folder cannot be made.
        LaunchError: A training run failed.
    """
    settings = {spec: parse_strategy_spec(spec) for spec in strategies}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ConfigError(f"folder {folder} cannot be made: {failure.strerror}") from failure
    run_file = folder / "demo.toml"
    run_file.write_text(to_toml(load(RunConfig, None, recipe=demo())))
    log_line("training with 1 worker")
    baseline = _train(run_file, "1-worker", 1, [], log_line)
    found = []
    for spec, (kind, more) in settings.items():
        log_line(f"training the same model, the same data, with {workers} workers: {spec}")
        name = f"{workers}-workers-{re.sub(r'[^a-z0-9_]+', '-', spec)}"
        record = _train(run_file, name, workers, [f"strategy.kind={kind}", *more], log_line)
        found.append(compare_runs(baseline, record, spec, workers))
    title = "Stretto demo"
    write_report(
        folder / "report.html",
        title,
        summarize_comparisons(found),
        [baseline, *(t.record for t in found)],
    )
    return found


def _train(
    run_file: Path,
    name: str,
    workers: int,
    overrides: Sequence[str],
    log_line: Callable[[str], None],
) -> RunRecord:
    folder = run_file.parent
    # Remove only a folder that a run wrote: its resolved.toml shows that.
    if (folder / name / "resolved.toml").exists():
        shutil.rmtree(folder / name)
    settings = [f"run.name={name}", f"run.folder={folder}", *overrides]
    logs = folder / name / "logs"
    outcome = run_local_workers(
        ["train", str(run_file), *settings], workers, logs=logs, log_line=log_line
    )
    if outcome.exit_code:
        raise LaunchError(outcome.reason)
    return load_run_record(folder / name)


def compare_runs(
    baseline: RunRecord, parallel: RunRecord, strategy: str, workers: int
) -> RunComparison:
    """Compare a run of several workers with the ``baseline`` of one worker."""
    parallel_losses = {moment.step.step: moment.step.loss for moment in logged_steps(parallel)}
    gaps = [
        abs(m.step.loss - parallel_losses[m.step.step]) / m.step.loss
        for m in logged_steps(baseline)
        if m.step.step in parallel_losses
    ]
    ends = [last_end(baseline), last_end(parallel)]
    accuracies = [e.accuracy if e and e.accuracy is not None else math.nan for e in ends]
    seconds = [e.seconds if e else math.nan for e in ends]
    return RunComparison(
        strategy,
        workers,
        parallel,
        max(gaps, default=math.inf),
        (accuracies[0], accuracies[1]),
        (seconds[0], seconds[1]),
    )


def summarize_comparisons(found: Sequence[RunComparison]) -> str:
    """Return a sentence for each comparison."""
    return " ".join(_sentence(one) for one in found)


def _sentence(one: RunComparison) -> str:
    baseline, parallel = one.accuracies
    label = f"1 worker and {one.workers} workers ({one.strategy})"
    ends = f"end at {baseline:.1%} and {parallel:.1%} accuracy"
    durations = f"after {one.seconds[0]:.1f} s and {one.seconds[1]:.1f} s"
    if not one.is_exact:
        near = "came near each other" if one.is_as_expected else "did NOT come near each other"
        return f"{label}, each with a model of its own, {near}: they {ends}, {durations}."
    same = "learned the same" if one.is_as_expected else "did NOT learn the same"
    gap = f"their losses never differ by more than {one.largest_gap:.1%}"
    return f"{label} {same}: {gap}, and they {ends}, {durations}."
