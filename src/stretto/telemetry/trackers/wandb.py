"""Events to Weights & Biases, in ``wandb/`` of the run's folder; offline unless the user says."""

import uuid

import wandb

from stretto.telemetry.events import Event, RunEnded
from stretto.telemetry.trackers.opening import Opening, keep_id, kept_id
from stretto.telemetry.trackers.scalars import scalars


class WandB:
    """A W&B run with the same id at every resumption; the console is left alone.

    Nothing leaves the machine unless the user says so with WANDB_MODE.
    """

    def __init__(self, opening: Opening) -> None:
        run_id = kept_id(opening, "wandb") or uuid.uuid4().hex[:12]
        keep_id(opening, "wandb", run_id)
        said = wandb.setup().settings  # as the user set them
        self._ended = False
        self._run = wandb.init(
            project=said.project or "stretto",
            name=opening.run,
            id=run_id,
            dir=str(opening.run_dir),
            config=dict(opening.settings),
            resume="allow",
            mode=None if "mode" in said.model_fields_set else "offline",
            settings=wandb.Settings(console="off", silent=True),
        )

    def __call__(self, event: Event) -> None:
        """Log the scalars of ``event``; those of the end go to the summary as well."""
        found = scalars(event)
        if found is None:
            return
        self._run.log(dict(found.values), step=found.step)
        if isinstance(event, RunEnded):
            self._ended = True
            self._run.summary.update({**found.values, "stopped": event.stopped})

    def close(self) -> None:
        """Finish the run, as failed where it did not say that it ended, and end W&B's process."""
        exit_code = 0 if self._ended else 1
        try:
            self._run.finish(exit_code=exit_code)
        finally:
            wandb.teardown(exit_code)
