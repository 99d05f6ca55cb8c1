"""Experiment trackers as sinks: TensorBoard, Weights & Biases and MLflow.

A tracker's library is imported only if the run names the tracker. The run's own record is
``events.jsonl``. A tracker that fails is closed, the failure is logged once, and training goes on.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from stretto.errors import ConfigError
from stretto.telemetry.events import Event
from stretto.telemetry.sinks import Sink, write_atomically


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker is opened for."""

    run_dir: Path
    run: str
    """The run's name."""
    settings: Mapping[str, object]
    """Every setting by dotted key."""
    resumed: bool
    """Whether this start resumes an earlier one."""


def load_tracker_run_id(tracked_run: TrackedRun, tracker: str) -> str | None:
    """Return the id that ``tracker`` gave the run that is resumed; None for a new run."""
    path = _run_id_path(tracked_run, tracker)
    return path.read_text().strip() if tracked_run.resumed and path.exists() else None


def save_tracker_run_id(tracked_run: TrackedRun, tracker: str, run_id: str) -> None:
    """Store ``run_id`` in the run's folder, for resumptions."""
    write_atomically(_run_id_path(tracked_run, tracker), run_id + "\n")


def _run_id_path(tracked_run: TrackedRun, tracker: str) -> Path:
    return tracked_run.run_dir / "trackers" / f"{tracker}.id"


@dataclass(frozen=True, slots=True)
class Tracker:
    """Where to import a tracker's sink from, and the package and environment it needs."""

    sink: str
    """As ``module:class``; the class takes a `TrackedRun`."""
    package: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set before the library is imported, unless the user set them."""


TRACKERS: Mapping[str, Tracker] = {
    "tensorboard": Tracker("stretto.telemetry.tracker_backends:TensorBoard", "tensorboard"),
    "wandb": Tracker(
        "stretto.telemetry.tracker_backends:WandB",
        "wandb",
        {"WANDB_ERROR_REPORTING": "false"},  # it sends error reports even when offline
    ),
    "mlflow": Tracker(
        "stretto.telemetry.tracker_backends:MLflow",
        "mlflow",
        {
            "MLFLOW_DISABLE_TELEMETRY": "true",  # it sends usage data by default
            # The file store needs neither server nor database, but must be allowed explicitly.
            "MLFLOW_ALLOW_FILE_STORE": "true",
            # A server that does not answer delays the run by 30 s at most, not by minutes.
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        },
    ),
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a tracker that is unknown, named twice, or not installed."""
    for name in names:
        if name not in TRACKERS:
            near = get_close_matches(name, TRACKERS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(TRACKERS)}"
            raise ConfigError(f"run.trackers: unknown tracker {name!r}; {hint}")
        if names.count(name) > 1:
            raise ConfigError(f"run.trackers: {name!r} is named twice")
        if find_spec(TRACKERS[name].package) is None:
            raise ConfigError(
                f'run.trackers: {name!r} is not installed: pip install "stretto[{name}]"'
            )


def set_tracker_environment(names: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Set variables in ``environ`` that turn off telemetry and shorten timeouts of trackers.

    Variables that are already set stay. The libraries read them when they are imported, so call
    this before `open_trackers`.
    """
    for name in names:
        for variable, value in TRACKERS[name].environment.items():
            environ.setdefault(variable, value)


def open_trackers(
    names: Sequence[str],
    run_dir: Path,
    run: str,
    settings: Mapping[str, object],
    *,
    resumed: bool,
    log_line: Callable[[str], None],
) -> list[Sink]:
    """Return a sink for each tracker; call it on rank 0 only, when the run's folder exists.

    Args:
        names: Keys of `TRACKERS`.
        run_dir: The run's folder; trackers write below it unless the user has set a server.
        run: The run's name.
        settings: Every setting by dotted key.
        resumed: Whether this start resumes an earlier one.
        log_line: Called with one line when a tracker fails, at the start or later.
    """
    check_trackers(names)
    tracked_run = TrackedRun(run_dir, run, settings, resumed)
    return [_FailSafeTracker(name, tracked_run, log_line) for name in names]


class _FailSafeTracker:
    """A tracker whose first failure is logged; it is then closed and receives no more events."""

    def __init__(self, name: str, tracked_run: TrackedRun, log_line: Callable[[str], None]) -> None:
        self._name = name
        self._log_line = log_line
        self._sink: Sink | None = None
        self._call_safely(lambda: self._open(tracked_run))

    def __call__(self, event: Event) -> None:
        sink = self._sink
        if sink is not None:
            self._call_safely(lambda: sink(event))

    def close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            self._call_safely(sink.close)

    def _open(self, tracked_run: TrackedRun) -> None:
        module, _, kind = TRACKERS[self._name].sink.partition(":")
        self._sink = getattr(import_module(module), kind)(tracked_run)

    def _call_safely(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as failure:  # noqa: BLE001 - no tracker may stop the run
            reason = " ".join(f"{type(failure).__name__}: {failure}".split())
            self._log_line(f"tracker {self._name} failed and is closed, the run goes on: {reason}")
            self._close_after_failure()

    def _close_after_failure(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            with suppress(Exception):  # its failure is logged already
                sink.close()
