"""What a run tells while it goes on: frozen events, and their form as one JSON object each."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from stretto.errors import StrettoError


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The first word of a run, and again of every resumption of it."""

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
    """So many steps are done; the shares are parts of a step's time and sum to at most one."""

    step: int
    epoch: int
    loss: float
    lr: float
    samples_per_s: float
    step_s: float
    compute_share: float
    comm_share: float
    """Communication that compute did not hide."""
    data_share: float
    """Waiting for the next batch."""
    time_left_s: float
    apart: float | None = None
    """How far ranks' own models were from their mean when that was last measured, on a sample of
    their parameters: the root of the mean square, as a share of its norm."""


@dataclass(frozen=True, slots=True)
class StepLeftOut:
    """A step changed nothing: a loss or gradient was not finite, on some rank."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class EvalDone:
    """The model as it was after ``step``, measured on data it has not been trained on."""

    step: int
    epoch: int
    loss: float
    accuracy: float | None
    """Right answers as a fraction of all; None where the task has no such thing."""
    own_loss: float | None = None
    own_accuracy: float | None = None
    """The same of ranks' own models, each on its share of the data, where they differ; the model
    measured above is then their mean."""
    apart: float | None = None
    """How far they are from that mean: the root of the mean square, as a share of its norm."""


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is complete at ``path``: from here on a resumption may start with it."""

    step: int
    path: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DataRead:
    """What reading took since the last word of this kind, over all ranks."""

    step: int
    epoch: int
    decoded: int
    """Samples made from their files."""
    cached: int
    """Samples that an earlier epoch had left decoded."""
    skipped: int
    """Samples that could not be read; the steps went on without them."""
    files: list[str]
    """Each of them that had not been named before, with the reason."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """T = S x N x e: how a run's throughput comes about."""

    one_worker: float
    """S, samples a second: what a worker does while it waits neither for others nor for data."""
    workers: int
    """N."""
    efficiency: float
    """e: what is left of N times S in the end."""


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The last word of a run that came to its end by itself, or was asked to stop and saved."""

    step: int
    seconds: float
    loss: float
    accuracy: float | None
    samples_per_s: float
    """T, of the training steps alone."""
    scaling: Scaling | None = None
    """How T comes about; None where no step was measured."""
    stopped: str = ""
    """Why it ended before its last step; empty when it did not."""
    again: bool = False
    """It is to be started again, and will go on from what it saved."""


Event = RunStarted | StepDone | StepLeftOut | EvalDone | DataRead | CheckpointSaved | RunEnded

EVENTS: Mapping[str, type[Event]] = {
    "run_started": RunStarted,
    "step_done": StepDone,
    "step_left_out": StepLeftOut,
    "eval_done": EvalDone,
    "data_read": DataRead,
    "checkpoint_saved": CheckpointSaved,
    "run_ended": RunEnded,
}
_NAMES = {kind: name for name, kind in EVENTS.items()}


def to_record(event: Event, *, time: str | None = None) -> dict[str, Any]:
    """Return ``event`` as an object that every JSON reader takes.

    JSON has no NaN and no infinity: they become the words "nan", "inf" and "-inf".

    Args:
        event: What happened.
        time: When, as ISO wall-clock text; an event knows no clock, the sink that keeps it does.
    """
    stamp = {} if time is None else {"time": time}
    return {"event": _NAMES[type(event)], **stamp, **_speakable(asdict(event))}


def from_record(record: Mapping[str, Any]) -> Event:
    """Return the event that `to_record` was given; keys it does not know are left aside."""
    kind = EVENTS.get(str(record.get("event")))
    if kind is None:
        raise StrettoError(
            f"unknown event {record.get('event')!r}: expected one of {', '.join(EVENTS)}"
        )
    try:
        return _adapters()[kind].validate_python(dict(record))
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise StrettoError(
            f"event {record['event']!r} does not fit its form: {where}: {first['msg']}, "
            f"got {first['input']!r}"
        ) from None


@cache
def _adapters() -> dict[type[Event], TypeAdapter[Event]]:
    return {kind: TypeAdapter(kind) for kind in EVENTS.values()}


def _speakable(value: Any) -> Any:  # noqa: ANN401 - any JSON value in, any JSON value out
    if isinstance(value, Mapping):
        return {key: _speakable(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
