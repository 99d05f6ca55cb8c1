"""Trackers of others as sinks: TensorBoard, Weights & Biases, MLflow; none is imported unasked.

The run's own record stays ``events.jsonl``. A tracker is a guest: when it fails, it is shown the
door, that is said once, and training goes on.
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
from stretto.telemetry.sinks import Sink
from stretto.telemetry.trackers.opening import Opening


@dataclass(frozen=True, slots=True)
class Tracker:
    """Where a tracker's sink is found, and what must be installed for it."""

    sink: str
    """As ``module:class``; the class takes an `Opening`."""
    package: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the library should find in the environment, unless the user has set it."""


TRACKERS: Mapping[str, Tracker] = {
    "tensorboard": Tracker("stretto.telemetry.trackers.tensorboard:TensorBoard", "tensorboard"),
    "wandb": Tracker(
        "stretto.telemetry.trackers.wandb:WandB",
        "wandb",
        {"WANDB_ERROR_REPORTING": "false"},  # it reports on itself over the network, offline or not
    ),
    "mlflow": Tracker(
        "stretto.telemetry.trackers.mlflow:MLflow",
        "mlflow",
        {
            "MLFLOW_DISABLE_TELEMETRY": "true",  # likewise
            # A folder, the only store that needs no server and no database, is allowed by name.
            "MLFLOW_ALLOW_FILE_STORE": "true",
            # A server that is not there holds up the run for half a minute, not for several.
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


def keep_local(names: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Set in ``environ`` what keeps trackers quiet and their waits short; what is set there stays.

    The libraries read these variables when they are imported and have no other door for them, so
    whoever owns the environment calls this before `open_trackers`.
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
    say: Callable[[str], None],
) -> list[Sink]:
    """Return a sink for each tracker; for rank 0 alone, once the run's folder is its own.

    Args:
        names: Keys of `TRACKERS`.
        run_dir: The run's folder; trackers without a server of the user's write below it.
        run: The run's name.
        settings: Every setting by dotted key.
        resumed: Whether an earlier start of the same run is gone on with.
        say: Told in one line when a tracker fails, at the start or later.
    """
    check_trackers(names)
    opening = Opening(run_dir, run, settings, resumed)
    return [_Guest(name, opening, say) for name in names]


class _Guest:
    """A tracker whose failure is its own: said once, then it hears nothing more."""

    def __init__(self, name: str, opening: Opening, say: Callable[[str], None]) -> None:
        self._name = name
        self._say = say
        self._sink: Sink | None = None
        self._try(lambda: self._open(opening))

    def __call__(self, event: Event) -> None:
        sink = self._sink
        if sink is not None:
            self._try(lambda: sink(event))

    def close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            self._try(sink.close)

    def _open(self, opening: Opening) -> None:
        module, _, kind = TRACKERS[self._name].sink.partition(":")
        self._sink = getattr(import_module(module), kind)(opening)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as failure:  # noqa: BLE001 - whatever a guest does, the house stands
            reason = " ".join(f"{type(failure).__name__}: {failure}".split())
            self._say(f"tracker {self._name} failed and is closed, the run goes on: {reason}")
            self._dismiss()

    def _dismiss(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            with suppress(Exception):  # it has failed already, and that was said
                sink.close()
