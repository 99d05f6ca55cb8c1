"""Events to MLflow: to the user's server where one is set, else to ``mlruns/`` of the run."""

import time

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

from stretto.telemetry.events import Event, RunEnded
from stretto.telemetry.trackers.opening import Opening, keep_id, kept_id
from stretto.telemetry.trackers.scalars import flat_words, scalars

EXPERIMENT = "stretto"


class MLflow:
    """An MLflow run that a resumption goes on with."""

    def __init__(self, opening: Opening) -> None:
        self._client = _client(opening)
        self._ended = False
        self._run_id = self._resumed(opening) or self._created(opening)
        keep_id(opening, "mlflow", self._run_id)

    def __call__(self, event: Event) -> None:
        """Log the scalars of ``event``."""
        found = scalars(event)
        if found is None:
            return
        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, v, now_ms, found.step) for name, v in found.values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)
        if isinstance(event, RunEnded):
            self._ended = True
            self._client.set_tag(self._run_id, "stopped", event.stopped)

    def close(self) -> None:
        """Mark the run as finished, or as failed where it did not say that it ended."""
        self._client.set_terminated(self._run_id, "FINISHED" if self._ended else "FAILED")

    def _created(self, opening: Opening) -> str:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        where = found.experiment_id if found else self._client.create_experiment(EXPERIMENT)
        run = self._client.create_run(where, run_name=opening.run)
        self._log_settings(run.info.run_id, _words(opening))
        return str(run.info.run_id)

    def _resumed(self, opening: Opening) -> str | None:
        """Open the run's earlier part again; None where this store does not know it."""
        run_id = kept_id(opening, "mlflow")
        if run_id is None:
            return None
        try:
            known = self._client.get_run(run_id).data.params
        except MlflowException as failure:
            if failure.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                return None
            raise  # a server that does not answer may know it yet
        self._client.update_run(run_id, status="RUNNING")
        words = _words(opening)
        self._log_settings(run_id, {key: words[key] for key in words.keys() - known.keys()})
        # MLflow never changes a parameter: what a resumption sets anew is told as a tag.
        changed = {key for key in words.keys() & known.keys() if words[key] != known[key]}
        tags = [RunTag(f"resumed.{key}", words[key]) for key in sorted(changed)]
        self._client.log_batch(run_id, tags=tags)
        return run_id

    def _log_settings(self, run_id: str, words: dict[str, str]) -> None:
        params = [Param(key, word) for key, word in words.items()]
        for first in range(0, len(params), 100):  # the most that a server takes at once
            self._client.log_batch(run_id, params=params[first : first + 100])


def _client(opening: Opening) -> MlflowClient:
    if mlflow.is_tracking_uri_set():
        return MlflowClient()
    return MlflowClient((opening.run_dir / "mlruns").absolute().as_uri())


def _words(opening: Opening) -> dict[str, str]:
    return {key: str(value) for key, value in flat_words(opening.settings).items()}
