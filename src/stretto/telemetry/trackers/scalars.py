"""What trackers plot: the numbers of an event by name, and settings as words they take."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.telemetry.events import DataRead, EvalDone, Event, RunEnded, StepDone


@dataclass(frozen=True, slots=True)
class Scalars:
    """Numbers by name, as they were after so many steps; some may be NaN or infinite."""

    step: int
    values: Mapping[str, float]


def scalars(event: Event) -> Scalars | None:
    """Return the numbers that ``event`` brings, None where it has none to plot."""
    match event:
        case StepDone():
            values = _step(event)
        case EvalDone():
            values = {
                "eval/loss": event.loss,
                "eval/accuracy": event.accuracy,
                "eval/own_loss": event.own_loss,
                "eval/own_accuracy": event.own_accuracy,
                "eval/apart": event.apart,
            }
        case DataRead():
            values = {
                "data/decoded": event.decoded,
                "data/cached": event.cached,
                "data/skipped": event.skipped,
            }
        case RunEnded():
            values = _ended(event)
        case _:
            return None
    known = {name: float(value) for name, value in values.items() if value is not None}
    return Scalars(event.step, known)


def flat_words(settings: Mapping[str, object]) -> dict[str, str | int | float | bool]:
    """Return settings as every tracker takes them: text, numbers, truth; the rest as JSON text."""
    return {
        key: value if isinstance(value, str | int | float | bool) else json.dumps(value)
        for key, value in settings.items()
    }


def _step(event: StepDone) -> dict[str, float | None]:
    return {
        "train/loss": event.loss,
        "train/lr": event.lr,
        "train/apart": event.apart,
        "speed/samples_per_s": event.samples_per_s,
        "speed/step_s": event.step_s,
        "share/compute": event.compute_share,
        "share/communication": event.comm_share,
        "share/data": event.data_share,
    }


def _ended(event: RunEnded) -> dict[str, float | None]:
    return {
        "end/loss": event.loss,
        "end/accuracy": event.accuracy,
        "end/seconds": event.seconds,
        "end/samples_per_s": event.samples_per_s,
        "end/one_worker_per_s": event.scaling.one_worker if event.scaling else None,
        "end/efficiency": event.scaling.efficiency if event.scaling else None,
    }
