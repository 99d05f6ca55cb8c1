"""The table of a report: one row of figures per run, in words that fit a cell."""

import math
from dataclasses import dataclass

from stretto.report.figures import PALETTE
from stretto.report.records import RunRecord, ended, evaluations, moments, started
from stretto.telemetry.wording import printable

ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """What a run came to; every field is ready to be shown, not yet escaped for HTML."""

    name: str
    colour: str
    strategy: str
    workers: str
    steps: str
    loss: str
    accuracy: str
    samples_per_s: str
    seconds: str


def summary_row(run: RunRecord, index: int) -> Row:
    """Return the row of ``run``; ``index`` gives it the colour that it has in the figures."""
    start, end = started(run), ended(run)
    loss, samples_per_s, seconds = _measured(run)
    return Row(
        name=printable(run.name) or "(no name)",
        colour=PALETTE[index % len(PALETTE)],
        strategy=printable(start.strategy) if start else ABSENT,
        workers=f"{start.workers:,}" if start else ABSENT,
        steps=_steps(run),
        loss=number(loss, ".4f"),
        accuracy=number(end.accuracy if end else _last_accuracy(run), ".1%"),
        samples_per_s=number(samples_per_s, ",.0f"),
        seconds=number(seconds, ",.1f"),
    )


def number(value: float | None, form: str) -> str:
    """Return ``value`` in ``form``; what is missing, infinite or no number is said in words."""
    if value is None:
        return ABSENT
    if math.isnan(value):
        return "not a number"
    return format(value, form) if math.isfinite(value) else "infinite"


def _measured(run: RunRecord) -> tuple[float | None, float | None, float | None]:
    """Return loss, samples per second and seconds: of the whole run, or as far as it came."""
    end = ended(run)
    if end is not None:
        return end.loss, end.samples_per_s, end.seconds
    logged = moments(run)
    if not logged:
        return None, None, None
    last = logged[-1]
    return last.step.loss, last.step.samples_per_s, last.seconds


def _steps(run: RunRecord) -> str:
    start, end, logged = started(run), ended(run), moments(run)
    if end is not None:
        return f"{end.step:,}"
    reached = f"{logged[-1].step.step:,}" if logged else "0"
    return f"{reached} of {start.steps:,}, not finished" if start else ABSENT


def _last_accuracy(run: RunRecord) -> float | None:
    measured = evaluations(run)
    return measured[-1].accuracy if measured else None
