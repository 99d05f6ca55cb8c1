"""Format events as one line of plain text that is safe for any terminal or log."""

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
    StepDone,
    StepSkipped,
    ThroughputFactors,
)
from stretto.units import format_bytes, format_s


def strip_unprintable(text: str) -> str:
    """Return ``text`` without characters that could control a terminal or its text direction.

    Any white space becomes a space. Control, format, surrogate and private-use characters are
    removed. Names come from run files, and a run file is not trusted.
    """
    if text.isprintable():  # the usual case: this check is about a hundred times faster
        return text
    spaced = (" " if char.isspace() else char for char in text)
    return "".join(char for char in spaced if not unicodedata.category(char).startswith("C"))


def event_line(event: Event, *, steps: int = 0) -> str:
    """Return ``event`` as one line; ``steps`` is the length of the run, 0 where unknown."""
    match event:
        case RunStarted():
            text = _run_started_text(event)
        case StepDone():
            progress = progress_text(event.step, steps)
            text = f"step {progress} | {speed_text(event)} | {time_shares_text(event)}"
        case StepSkipped():
            text = f"left out | {skipped_step_text(event)}"
        case EvalDone():
            text = f"evaluation | {evaluation_text(event)}"
        case DataRead():
            text = f"data | {data_read_text(event)}"
        case CheckpointSaved():
            text = f"checkpoint | {checkpoint_text(event)}"
        case RunEnded():
            text = _run_ended_text(event)
    return text


def progress_text(step: int, steps: int) -> str:
    """Return ``120/400``, or the step alone where the end is not known."""
    return f"{step}/{steps}" if steps else str(step)


def speed_text(event: StepDone) -> str:
    """Return loss, consensus distance, samples per second, time per step and time left."""
    distance = _consensus_distance_text(event.consensus_distance)
    return (
        f"loss {event.loss:.4f}{distance} | {event.samples_per_s:,.0f} samples/s | "
        f"{duration_text(event.step_s)} a step | {duration_text(event.time_left_s)} left"
    )


def time_shares_text(event: StepDone) -> str:
    """Return the shares of compute, communication and data in the time of a step."""
    parts = (
        ("compute", event.compute_share),
        ("communication", event.comm_share),
        ("data", event.data_share),
    )
    return ", ".join(f"{name} {percent_text(share)}" for name, share in parts)


def evaluation_text(event: EvalDone) -> str:
    """Return step, loss and accuracy of an evaluation."""
    text = f"step {event.step}, loss {event.loss:.4f}{_accuracy_text(event.accuracy)}"
    if event.local_loss is None:
        return text
    local_models = (
        f"models of the ranks: loss {event.local_loss:.4f}{_accuracy_text(event.local_accuracy)}"
    )
    return f"{text}; {local_models}{_consensus_distance_text(event.consensus_distance)}"


def data_read_text(event: DataRead) -> str:
    """Return counts of decoded, cached and skipped samples, and the first unreadable file."""
    text = f"step {event.step}, {event.decoded:,} decoded, {event.cached:,} from the cache"
    if event.skipped:
        text += f", {event.skipped:,} skipped"
    if event.files:
        more = f" and {len(event.files) - 1:,} more" if len(event.files) > 1 else ""
        text += f" ({strip_unprintable(event.files[0])}{more})"
    return text


def skipped_step_text(event: StepSkipped) -> str:
    """Return the step that was skipped, and the reason."""
    return f"step {event.step}, {strip_unprintable(event.reason)}"


def format_throughput_factors(event: ThroughputFactors) -> str:
    """Return the throughput as a product: one worker's rate x workers x efficiency."""
    workers = count_text(event.workers, "worker")
    return f"{event.one_worker:,.0f} x {workers} x {event.efficiency:.1%}"


def checkpoint_text(event: CheckpointSaved) -> str:
    """Return step, size, duration and path of a checkpoint."""
    size = format_bytes(event.num_bytes)
    path = strip_unprintable(event.path)
    return f"step {event.step}, {size} in {duration_text(event.seconds)}, {path}"


def duration_text(seconds: float) -> str:
    """Return ``seconds`` as text; "unknown" where it is NaN or infinite."""
    return format_s(seconds) if math.isfinite(seconds) else "unknown"


def percent_text(fraction: float) -> str:
    """Return a fraction as whole percent; "unknown" where it is NaN or infinite."""
    return f"{fraction:.0%}" if math.isfinite(fraction) else "unknown"


def _run_started_text(event: RunStarted) -> str:
    note = f" | {strip_unprintable(event.note)}" if event.note else ""
    return (
        f"run {strip_unprintable(event.run)} | "
        f"{strip_unprintable(event.model)} with {event.parameters:,} parameters | "
        f"{strip_unprintable(event.strategy)} | {count_text(event.workers, 'worker')} on "
        f"{count_text(event.hosts, 'host')}, {count_text(event.threads, 'thread')} each | "
        f"{count_text(event.steps, 'step')}{note}"
    )


def _run_ended_text(event: RunEnded) -> str:
    throughput = "" if event.scaling is None else f" = {format_throughput_factors(event.scaling)}"
    stopped = f" | {strip_unprintable(event.stopped)}" if event.stopped else ""
    return (
        f"ended after {count_text(event.step, 'step')} in {duration_text(event.seconds)} | "
        f"loss {event.loss:.4f}{_accuracy_text(event.accuracy)} | "
        f"{event.samples_per_s:,.0f} samples/s{throughput}{stopped}"
    )


def count_text(number: int, noun: str) -> str:
    """Return ``1 worker``, ``4 workers``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _accuracy_text(accuracy: float | None) -> str:
    return "" if accuracy is None else f", accuracy {accuracy:.1%}"


def _consensus_distance_text(consensus_distance: float | None) -> str:
    return "" if consensus_distance is None else f", {consensus_distance:.2%} apart"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ``rank 2``, ``ranks 1-3``, ``ranks 1, 4-6``."""
    ordered = sorted(ranks)
    # In a run of consecutive ranks, the difference between rank and index is constant.
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ordered), key=lambda indexed: indexed[1] - indexed[0])
    ]
    names = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank {names}" if len(ordered) == 1 else f"ranks {names}"
