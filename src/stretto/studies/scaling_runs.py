"""Run a scaling study: train all runs that it needs, several at a time, and keep their results.

Every finished run is a line in the results store, so an interrupted study continues where it
stopped.
"""

import atexit
import json
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

from stretto.data import AnyDataConfig, HostContext, SampleSource, open_sample_source
from stretto.errors import ConfigError, StrettoError
from stretto.launch.process_setup import exit_with_parent
from stretto.models import build_model
from stretto.recipes import load_run
from stretto.renamed import with_new_fields, with_new_settings
from stretto.run import PreparedRun, RunConfig, flat_settings, prepare
from stretto.strategies import AllReduceConfig, AnyStrategyConfig, ShardedConfig
from stretto.studies.priced_run import parse_strategy_spec
from stretto.studies.scaling_sweep import FactorSweep, GridCell, RunResult, StudyPoint
from stretto.virtual import ProgressCallback, check_virtual, find_device, train_virtually

Say = Callable[[str], None]
_SETTINGS_FILE, _RUNS_FILE = "study.json", "runs.jsonl"


class ResultsStore:
    """The results of one study, in a folder."""

    def __init__(self, folder: Path, common_settings: dict[str, object]) -> None:
        """Open the store in ``folder``, or start a new one.

        Raises:
            ConfigError: The folder holds a study with other settings.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _RUNS_FILE
        settings_file = folder / _SETTINGS_FILE
        settings_text = json.dumps(common_settings, indent=1, sort_keys=True) + "\n"
        if settings_file.exists():
            stored = with_new_settings(json.loads(settings_file.read_text(encoding="utf-8")))
            if differing_keys := _differing_keys(stored, json.loads(settings_text)):
                raise ConfigError(
                    f"{folder} holds a study with another {differing_keys}: use the same to "
                    "continue it, or another --out"
                )
        settings_file.write_text(settings_text, encoding="utf-8")
        self.done: dict[GridCell, RunResult] = dict(self._read())

    def write(self, cell: GridCell, done: RunResult) -> None:
        """Add a result; it is on the disk when this returns."""
        self.done[cell] = done
        line = json.dumps({"cell": asdict(cell), "done": asdict(done)})
        with self._path.open("a", encoding="utf-8") as store:
            store.write(line + "\n")
            store.flush()
            os.fsync(store.fileno())

    def _read(self) -> list[tuple[GridCell, RunResult]]:
        """Return all results; an incomplete last line, left by a crash, is removed."""
        if not self._path.exists():
            return []
        whole, newline, _incomplete = self._path.read_text(encoding="utf-8").rpartition("\n")
        self._path.write_text(whole + newline, encoding="utf-8")
        return [_from_json(json.loads(line)) for line in whole.splitlines()]


def _from_json(entry: dict[str, dict[str, object]]) -> tuple[GridCell, RunResult]:
    cell, done = dict(entry["cell"]), with_new_fields(entry["done"])
    point = StudyPoint(**cell.pop("point"))  # type: ignore[arg-type]
    distances = tuple((step, distance) for step, distance in done.pop("consensus_distance"))  # type: ignore[attr-defined]
    return GridCell(point, **cell), RunResult(consensus_distance=distances, **done)  # type: ignore[arg-type]


def _differing_keys(one: dict[str, object], other: dict[str, object]) -> str:
    keys = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
    return ", ".join(keys)


@dataclass(frozen=True, slots=True)
class RunTemplate:
    """The settings that all runs of a study share. It is sent to worker processes."""

    run: str
    """A run file, or a recipe's name."""
    overrides: tuple[str, ...] = ()
    threads: int = 1
    lost: float = 0.0
    """The share of gossip messages that are lost."""
    device: str = "cpu"

    def config(self, cell: GridCell) -> RunConfig:
        """Return the config of one run.

        Raises:
            ConfigError: The strategy, or a setting of it, is unknown.
        """
        lr = self._load(cell).optim.lr
        return self._load(cell, f"optim.lr={lr * cell.factor!r}")

    def lost_share_of(self, strategy: AnyStrategyConfig) -> float:
        """Return the share of messages that ``strategy`` loses: 0 for exact strategies."""
        exact = isinstance(strategy, AllReduceConfig | ShardedConfig)
        return 0.0 if exact else self.lost

    def _load(self, cell: GridCell, *more: str) -> RunConfig:
        kind, settings = parse_strategy_spec(cell.point.strategy)
        overrides = [
            *self.overrides,
            f"strategy.kind={kind}",
            *settings,
            f"train.batch={cell.point.batch}",
            f"run.seed={cell.seed}",
            *more,
        ]
        return load_run(Path(self.run), overrides).config


def run_cell(
    template: RunTemplate, cell: GridCell, on_event: ProgressCallback = lambda *_: None
) -> RunResult:
    """Train the virtual workers of ``cell`` and return the result."""
    torch.set_num_threads(template.threads)
    config = template.config(cell)
    model = build_model(config.model, config.run.seed)
    prepared = PreparedRun(*_sources(config.data), model)
    lost = template.lost_share_of(config.strategy)
    outcome = train_virtually(
        config, prepared, cell.point.workers, on_event, lost=lost, device=template.device
    )
    if outcome.stop_reason or not outcome.evaluations:
        return RunResult(
            0.0, seconds=outcome.seconds, diverged=outcome.stop_reason or "never evaluated"
        )
    last = outcome.evaluations[-1]
    if last.accuracy is None:
        raise ConfigError("a study compares accuracies: this task has none")
    return RunResult(
        last.accuracy,
        last.local_accuracy,
        last.loss,
        outcome.consensus_distances,
        outcome.seconds,
        outcome.samples_per_s,
    )


@lru_cache(maxsize=1)
def _sources(config: AnyDataConfig) -> tuple[SampleSource, SampleSource]:
    """Return the sources of training and test samples, opened once for all runs of this process."""
    sources = open_sample_source(config, train=True), open_sample_source(config, train=False)
    for source in sources:
        source.start(HostContext(0, 1, f"study-{os.getpid()}", lambda: None))
        atexit.register(source.close)
    return sources


@dataclass(frozen=True, slots=True)
class ScalingStudy:
    """The points to compare, and how their learning rates are swept."""

    template: RunTemplate
    points: tuple[StudyPoint, ...]
    sweep: FactorSweep

    def common_settings(self) -> dict[str, object]:
        """Return the settings that a results store must share with this study."""
        settings = flat_settings(self.template.config(GridCell(self.points[0], 1.0, 0)))
        free = ("strategy.", "run.", "train.batch")
        kept = {key: value for key, value in settings.items() if not key.startswith(free)}
        options: dict[str, object] = {"--factors": list(self.sweep.factors)}
        if self.template.lost:
            options["--lost"] = self.template.lost
        if self.template.device != "cpu":  # rounding differs between devices
            options["--device"] = self.template.device
        # Seeds and points are not among them: a study may be continued with more of both.
        return kept | options

    def check(self) -> None:
        """Check all points before the first run.

        Raises:
            ConfigError: A point cannot run, or the model does not fit the data.
        """
        find_device(self.template.device)
        for point in self.points:
            config = self.template.config(GridCell(point, 1.0, 0))
            check_virtual(config, point.workers, self.template.lost_share_of(config.strategy))
        prepare(self.template.config(GridCell(self.points[0], 1.0, 0)))

    def next_runs(self, done: Mapping[GridCell, RunResult]) -> list[GridCell]:
        """Return the runs that the points need next."""
        return [cell for point in self.points for cell in self.sweep.next_runs(point, done)]


def run_scaling_study(
    study: ScalingStudy, store: ResultsStore, *, jobs: int, log_line: Say
) -> None:
    """Train all runs that the study needs, ``jobs`` at a time in separate processes.

    Results go to ``store``. An interruption loses only the runs that have not finished.
    """
    context = multiprocessing.get_context("spawn")
    # Workers exit with this process. Otherwise they would wait for work forever if it is killed.
    with ProcessPoolExecutor(jobs, context, initializer=exit_with_parent) as pool:
        running: dict[Future[RunResult], GridCell] = {}
        try:
            while next_runs := study.next_runs(store.done):
                new = [cell for cell in next_runs if cell not in running.values()]
                for cell in new[: jobs - len(running)]:
                    running[pool.submit(run_cell, study.template, cell)] = cell
                _collect_finished(running, store, log_line)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _collect_finished(
    running: dict["Future[RunResult]", GridCell], store: ResultsStore, log_line: Say
) -> None:
    finished, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in finished:
        cell = running.pop(future)
        try:
            done = future.result()
        except StrettoError as wrong:
            raise type(wrong)(f"{describe_cell(cell)}: {wrong}") from None
        store.write(cell, done)
        log_line(f"{describe_cell(cell)}: {describe_result(done)}  ({len(store.done)} runs done)")


def describe_cell(cell: GridCell) -> str:
    """Return a run's settings as text."""
    point = cell.point
    return (
        f"{point.strategy}, {point.workers} workers, batch {point.batch}, rate x {cell.factor:g}, "
        f"seed {cell.seed}"
    )


def describe_result(done: RunResult) -> str:
    """Return a result as text."""
    if done.diverged:
        return f"diverged, {done.diverged}"
    return f"{done.accuracy:.2%} in {done.seconds:.0f} s ({done.samples_per_s:.0f} samples/s)"
