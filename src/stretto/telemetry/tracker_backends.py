"""Sinks that send a run's scalars and settings to MLflow, TensorBoard and Weights & Biases.

Each sink imports its library when it is opened, so that a run needs only the libraries it uses.
MLflow logs to the user's server if one is set, else to ``mlruns/`` of the run's folder.
TensorBoard writes to ``tensorboard/`` and W&B to ``wandb/``; W&B is offline unless configured.
"""

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.telemetry.events import DataRead, EvalDone, Event, RunEnded, StepDone
from stretto.telemetry.trackers import TrackedRun, load_tracker_run_id, save_tracker_run_id

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from torch.utils.tensorboard import SummaryWriter

EXPERIMENT = "stretto"


@dataclass(frozen=True, slots=True)
class Scalars:
    """Numbers by name after ``step`` steps; some may be NaN or infinite."""

    step: int
    values: Mapping[str, float]


def scalars(event: Event) -> Scalars | None:
    """Return the numbers of ``event`` that trackers plot, or None where it has none."""
    match event:
        case StepDone():
            values = _step_scalars(event)
        case EvalDone():
            values = {
                "eval/loss": event.loss,
                "eval/accuracy": event.accuracy,
                "eval/own_loss": event.local_loss,
                "eval/own_accuracy": event.local_accuracy,
                "eval/apart": event.consensus_distance,
            }
        case DataRead():
            values = {
                "data/decoded": event.decoded,
                "data/cached": event.cached,
                "data/skipped": event.skipped,
            }
        case RunEnded():
            values = _run_ended_scalars(event)
        case _:
            return None
    measured = {name: float(value) for name, value in values.items() if value is not None}
    return Scalars(event.step, measured)


def flatten_settings(settings: Mapping[str, object]) -> dict[str, str | int | float | bool]:
    """Return settings as text, numbers and booleans; other values become JSON text."""
    return {
        key: value if isinstance(value, str | int | float | bool) else json.dumps(value)
        for key, value in settings.items()
    }


def _step_scalars(event: StepDone) -> dict[str, float | None]:
    return {
        "train/loss": event.loss,
        "train/lr": event.lr,
        "train/apart": event.consensus_distance,
        "speed/samples_per_s": event.samples_per_s,
        "speed/step_s": event.step_s,
        "share/compute": event.compute_share,
        "share/communication": event.comm_share,
        "share/data": event.data_share,
    }


def _run_ended_scalars(event: RunEnded) -> dict[str, float | None]:
    return {
        "end/loss": event.loss,
        "end/accuracy": event.accuracy,
        "end/seconds": event.seconds,
        "end/samples_per_s": event.samples_per_s,
        "end/one_worker_per_s": event.scaling.one_worker if event.scaling else None,
        "end/efficiency": event.scaling.efficiency if event.scaling else None,
    }


class MLflow:
    """Logs to an MLflow run; a resumption continues the same MLflow run."""

    def __init__(self, tracked_run: TrackedRun) -> None:
        self._client = _open_client(tracked_run)
        self._ended = False
        self._run_id = self._resume_run(tracked_run) or self._create_run(tracked_run)
        save_tracker_run_id(tracked_run, "mlflow", self._run_id)

    def __call__(self, event: Event) -> None:
        """Log the scalars of ``event``."""
        from mlflow.entities import Metric

        event_scalars = scalars(event)
        if event_scalars is None:
            return
        now_ms, step = int(time.time() * 1000), event_scalars.step
        metrics = [Metric(name, v, now_ms, step) for name, v in event_scalars.values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)
        if isinstance(event, RunEnded):
            self._ended = True
            self._client.set_tag(self._run_id, "stopped", event.stopped)

    def close(self) -> None:
        """Mark the run as finished, or as failed if no `RunEnded` was logged."""
        self._client.set_terminated(self._run_id, "FINISHED" if self._ended else "FAILED")

    def _create_run(self, tracked_run: TrackedRun) -> str:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        where = found.experiment_id if found else self._client.create_experiment(EXPERIMENT)
        run = self._client.create_run(where, run_name=tracked_run.run)
        self._log_settings(run.info.run_id, _run_parameters(tracked_run))
        return str(run.info.run_id)

    def _resume_run(self, tracked_run: TrackedRun) -> str | None:
        """Reopen the MLflow run of the earlier start; None where the store does not have it."""
        from mlflow.entities import RunTag
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        run_id = load_tracker_run_id(tracked_run, "mlflow")
        if run_id is None:
            return None
        try:
            logged_parameters = self._client.get_run(run_id).data.params
        except MlflowException as failure:
            if failure.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                return None
            raise  # a server that does not answer may still have the run
        self._client.update_run(run_id, status="RUNNING")
        parameters = _run_parameters(tracked_run)
        self._log_settings(
            run_id, {key: parameters[key] for key in parameters.keys() - logged_parameters.keys()}
        )
        # MLflow cannot change a parameter, so changed settings of a resumption become tags.
        changed = {
            key
            for key in parameters.keys() & logged_parameters.keys()
            if parameters[key] != logged_parameters[key]
        }
        tags = [RunTag(f"resumed.{key}", parameters[key]) for key in sorted(changed)]
        self._client.log_batch(run_id, tags=tags)
        return run_id

    def _log_settings(self, run_id: str, parameters: dict[str, str]) -> None:
        from mlflow.entities import Param

        params = [Param(key, value) for key, value in parameters.items()]
        for first in range(0, len(params), 100):  # a server takes at most 100 in one call
            self._client.log_batch(run_id, params=params[first : first + 100])


def _open_client(tracked_run: TrackedRun) -> "MlflowClient":
    import mlflow
    from mlflow import MlflowClient

    if mlflow.is_tracking_uri_set():
        return MlflowClient()
    return MlflowClient((tracked_run.run_dir / "mlruns").absolute().as_uri())


def _run_parameters(tracked_run: TrackedRun) -> dict[str, str]:
    return {key: str(value) for key, value in flatten_settings(tracked_run.settings).items()}


class TensorBoard:
    """Writes scalars to an event file and flushes them before the next step.

    The file is opened at the first scalar. A resumed run marks the scalars that an earlier start
    wrote from that step on as void, because it repeats those steps.
    """

    def __init__(self, tracked_run: TrackedRun) -> None:
        self._tracked_run = tracked_run
        self._writer: SummaryWriter | None = None

    def __call__(self, event: Event) -> None:
        """Write the scalars of ``event``."""
        event_scalars = scalars(event)
        if event_scalars is None:
            return
        if self._writer is None:
            self._writer = self._open(event_scalars.step)
        for name, value in event_scalars.values.items():
            self._writer.add_scalar(name, value, event_scalars.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file, if it was opened."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, first_step: int) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        tracked_run = self._tracked_run
        folder = tracked_run.run_dir / "tensorboard"
        writer = SummaryWriter(str(folder), purge_step=first_step if tracked_run.resumed else None)
        # add_hparams would create a second run below this one, so its summaries are written here.
        shown = dict.fromkeys(("end/loss", "end/accuracy"), 0.0)
        experiment, session, _ = hparams(flatten_settings(tracked_run.settings), shown)
        for part in (experiment, session):
            writer._get_file_writer().add_summary(part)
        return writer


class WandB:
    """Logs to a W&B run, with the same id at every resumption; the console is not captured.

    It runs offline unless the user sets WANDB_MODE.
    """

    def __init__(self, tracked_run: TrackedRun) -> None:
        import wandb

        run_id = load_tracker_run_id(tracked_run, "wandb") or uuid.uuid4().hex[:12]
        save_tracker_run_id(tracked_run, "wandb", run_id)
        user_settings = wandb.setup().settings
        self._ended = False
        self._run = wandb.init(
            project=user_settings.project or "stretto",
            name=tracked_run.run,
            id=run_id,
            dir=str(tracked_run.run_dir),
            config=dict(tracked_run.settings),
            resume="allow",
            mode=None if "mode" in user_settings.model_fields_set else "offline",
            settings=wandb.Settings(console="off", silent=True),
        )

    def __call__(self, event: Event) -> None:
        """Log the scalars of ``event``; those of `RunEnded` go to the summary, too."""
        event_scalars = scalars(event)
        if event_scalars is None:
            return
        self._run.log(dict(event_scalars.values), step=event_scalars.step)
        if isinstance(event, RunEnded):
            self._ended = True
            self._run.summary.update({**event_scalars.values, "stopped": event.stopped})

    def close(self) -> None:
        """Finish the run, as failed if no `RunEnded` was logged, and stop W&B's process."""
        import wandb

        exit_code = 0 if self._ended else 1
        try:
            self._run.finish(exit_code=exit_code)
        finally:
            wandb.teardown(exit_code)
