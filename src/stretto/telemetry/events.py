"""The events of a run as frozen values, and their form as JSON objects."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from stretto.errors import StrettoError
from stretto.renamed import with_new_fields


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The first event of a run, and of every resumption of it."""

    run: str
    workers: int
    hosts: int
    strategy: str
    steps: int
    model: str
    parameters: int
    threads: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class StepDone:
    """``step`` steps are done. The shares are fractions of a step's time and sum to at most 1."""

    step: int
    epoch: int
    loss: float
    lr: float
    samples_per_s: float
    step_s: float
    compute_share: float
    comm_share: float
    """Communication that did not overlap with compute."""
    data_share: float
    """Waiting for the next batch."""
    time_left_s: float
    consensus_distance: float | None = None
    """Distance of the ranks' local models from their mean when last measured, on a sample of the
    parameters: root mean square over ranks, as a fraction of the norm of the mean."""


@dataclass(frozen=True, slots=True)
class StepSkipped:
    """A step that made no update, because a loss or gradient was not finite on some rank."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class EvalDone:
    """The model after ``step``, evaluated on the test data."""

    step: int
    epoch: int
    loss: float
    accuracy: float | None
    """Fraction of correct predictions; None where the task has no accuracy."""
    local_loss: float | None = None
    local_accuracy: float | None = None
    """``local_loss`` and ``local_accuracy`` are of the ranks' local models, each on its share of
    the data. None where all ranks have the same model; else ``loss`` is that of their mean."""
    consensus_distance: float | None = None
    """Distance of the local models from that mean: root mean square over ranks, as a fraction of
    the norm of the mean."""


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint at ``path`` is complete; a resumption can start from it."""

    step: int
    path: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DataRead:
    """Counts of samples read on all ranks since the previous event of this kind."""

    step: int
    epoch: int
    decoded: int
    """Samples decoded from their files."""
    cached: int
    """Samples taken decoded from the cache."""
    skipped: int
    """Samples that could not be read; the steps were made without them."""
    files: list[str]
    """Unreadable files that no earlier event named, each with the reason."""


@dataclass(frozen=True, slots=True)
class ThroughputFactors:
    """The factors of a run's throughput: T = S x N x e."""

    one_worker: float
    """S: samples per second of one worker while it waits neither for others nor for data."""
    workers: int
    """N: number of workers."""
    efficiency: float
    """e: measured throughput as a fraction of N x S."""


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The last event of a run that finished, or that saved and stopped on request."""

    step: int
    seconds: float
    loss: float
    accuracy: float | None
    samples_per_s: float
    """T, over the time of the training steps only."""
    scaling: ThroughputFactors | None = None
    """The factors of T; None where no step was measured."""
    stopped: str = ""
    """Why the run ended before its last step; empty when it finished."""
    again: bool = False
    """Whether the run should be started again, to resume from its checkpoint."""


Event = RunStarted | StepDone | StepSkipped | EvalDone | DataRead | CheckpointSaved | RunEnded

EVENTS: Mapping[str, type[Event]] = {
    "run_started": RunStarted,
    "step_done": StepDone,
    "step_left_out": StepSkipped,
    "eval_done": EvalDone,
    "data_read": DataRead,
    "checkpoint_saved": CheckpointSaved,
    "run_ended": RunEnded,
}
_EVENT_NAMES = {kind: name for name, kind in EVENTS.items()}


def to_record(event: Event, *, time: str | None = None) -> dict[str, Any]:
    """Return ``event`` as an object of strict JSON.

    JSON has no NaN and no infinity: they become the strings "nan", "inf" and "-inf".

    Args:
        event: The event.
        time: Wall-clock time as ISO text. An event has no time itself; the sink adds it.
    """
    stamp = {} if time is None else {"time": time}
    return {"event": _EVENT_NAMES[type(event)], **stamp, **_json_safe(asdict(event))}


def from_record(record: Mapping[str, Any]) -> Event:
    """Return the event of a record made by `to_record`; unknown keys are ignored.

    Raises:
        StrettoError: The event is unknown, or a field is missing or has a wrong type.
    """
    kind = EVENTS.get(str(record.get("event")))
    if kind is None:
        raise StrettoError(
            f"unknown event {record.get('event')!r}: expected one of {', '.join(EVENTS)}"
        )
    try:
        return _type_adapters()[kind].validate_python(with_new_fields(record))
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise StrettoError(
            f"event {record['event']!r} does not fit its form: {where}: {first['msg']}, "
            f"got {first['input']!r}"
        ) from None


@cache
def _type_adapters() -> dict[type[Event], TypeAdapter[Event]]:
    return {kind: TypeAdapter(kind) for kind in EVENTS.values()}


def _json_safe(value: Any) -> Any:  # noqa: ANN401 - any JSON value in, any JSON value out
    if isinstance(value, Mapping):
        return {key: _json_safe(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
