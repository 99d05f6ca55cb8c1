"""How events read as one line of plain text, safe to send to any terminal or log."""

import math
import unicodedata
from collections.abc import Iterable
from itertools import groupby

from stretto.telemetry.events import (
    CheckpointSaved,
    DataRead,
    EvalDone,
    Event,
    RunEnded,
    RunStarted,
    Scaling,
    StepDone,
    StepLeftOut,
)
from stretto.units import format_bytes, format_s


def printable(text: str) -> str:
    """Return ``text`` without what could steer a terminal or turn the reading direction.

    White space of any kind becomes a blank; control, format, surrogate and private characters go.
    Names come from run files, and a run file may come from anybody.
    """
    if text.isprintable():  # most are, and finding out is a hundred times faster
        return text
    spaced = (" " if char.isspace() else char for char in text)
    return "".join(char for char in spaced if not unicodedata.category(char).startswith("C"))


def line(event: Event, *, steps: int = 0) -> str:
    """Return ``event`` as one line; ``steps`` is the length of the run, 0 where unknown."""
    match event:
        case RunStarted():
            told = _started(event)
        case StepDone():
            told = f"step {progress(event.step, steps)} | {speed(event)} | {shares(event)}"
        case StepLeftOut():
            told = f"left out | {left_out(event)}"
        case EvalDone():
            told = f"evaluation | {evaluation(event)}"
        case DataRead():
            told = f"data | {reading(event)}"
        case CheckpointSaved():
            told = f"checkpoint | {checkpoint(event)}"
        case RunEnded():
            told = _ended(event)
    return told


def progress(step: int, steps: int) -> str:
    """Return ``120/400``, or the step alone where the end is not known."""
    return f"{step}/{steps}" if steps else str(step)


def speed(event: StepDone) -> str:
    """Return loss, how far apart models are, rate, time per step and time left."""
    return (
        f"loss {event.loss:.4f}{_apart(event.apart)} | {event.samples_per_s:,.0f} samples/s | "
        f"{duration(event.step_s)} a step | {duration(event.time_left_s)} left"
    )


def shares(event: StepDone) -> str:
    """Return where the time of the step went."""
    parts = (
        ("compute", event.compute_share),
        ("communication", event.comm_share),
        ("data", event.data_share),
    )
    return ", ".join(f"{name} {percent(share)}" for name, share in parts)


def evaluation(event: EvalDone) -> str:
    """Return loss and accuracy of an evaluation, and the step it was made at."""
    told = f"step {event.step}, loss {event.loss:.4f}{_accuracy(event.accuracy)}"
    if event.own_loss is None:
        return told
    own = f"ranks' own models: loss {event.own_loss:.4f}{_accuracy(event.own_accuracy)}"
    return f"{told}; {own}{_apart(event.apart)}"


def reading(event: DataRead) -> str:
    """Return where samples came from, and the first of those that could not be read."""
    told = f"step {event.step}, {event.decoded:,} decoded, {event.cached:,} from the cache"
    if event.skipped:
        told += f", {event.skipped:,} skipped"
    if event.files:
        more = f" and {len(event.files) - 1:,} more" if len(event.files) > 1 else ""
        told += f" ({printable(event.files[0])}{more})"
    return told


def left_out(event: StepLeftOut) -> str:
    """Return which step changed nothing, and why."""
    return f"step {event.step}, {printable(event.reason)}"


def scaling(event: Scaling) -> str:
    """Return how the throughput comes about: S x N x e."""
    workers = counted(event.workers, "worker")
    return f"{event.one_worker:,.0f} x {workers} x {event.efficiency:.1%}"


def checkpoint(event: CheckpointSaved) -> str:
    """Return which step is safe, and what it cost."""
    size = format_bytes(event.num_bytes)
    return f"step {event.step}, {size} in {duration(event.seconds)}, {printable(event.path)}"


def duration(seconds: float) -> str:
    """Return ``seconds`` for a person; a time nobody can know is called unknown."""
    return format_s(seconds) if math.isfinite(seconds) else "unknown"


def percent(fraction: float) -> str:
    """Return a share as whole percent."""
    return f"{fraction:.0%}" if math.isfinite(fraction) else "unknown"


def _started(event: RunStarted) -> str:
    note = f" | {printable(event.note)}" if event.note else ""
    return (
        f"run {printable(event.run)} | {printable(event.model)} with {event.parameters:,} "
        f"parameters | {printable(event.strategy)} | {counted(event.workers, 'worker')} on "
        f"{counted(event.hosts, 'host')}, {counted(event.threads, 'thread')} each | "
        f"{counted(event.steps, 'step')}{note}"
    )


def _ended(event: RunEnded) -> str:
    made = "" if event.scaling is None else f" = {scaling(event.scaling)}"
    stopped = f" | {printable(event.stopped)}" if event.stopped else ""
    return (
        f"ended after {counted(event.step, 'step')} in {duration(event.seconds)} | "
        f"loss {event.loss:.4f}{_accuracy(event.accuracy)} | "
        f"{event.samples_per_s:,.0f} samples/s{made}{stopped}"
    )


def counted(number: int, noun: str) -> str:
    """Return ``1 worker``, ``4 workers``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _accuracy(accuracy: float | None) -> str:
    return "" if accuracy is None else f", accuracy {accuracy:.1%}"


def _apart(apart: float | None) -> str:
    return "" if apart is None else f", {apart:.2%} apart"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ``rank 2``, ``ranks 1-3``, ``ranks 1, 4-6``."""
    ordered = sorted(ranks)
    # Neighbours in a run of numbers share the difference to their place.
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ordered), key=lambda placed: placed[1] - placed[0])
    ]
    names = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank {names}" if len(ordered) == 1 else f"ranks {names}"
