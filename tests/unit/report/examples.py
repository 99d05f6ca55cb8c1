"""Synthetic runs for the tests of the report."""

import math

from stretto.report.run_records import RunRecord
from stretto.telemetry.events import EvalDone, RunEnded, RunStarted, StepDone
from stretto.telemetry.timeline import Span, Timeline


def start(run="run", *, steps=10, workers=4, strategy="allreduce"):
    return RunStarted(run, workers, workers, strategy, steps, "cnn", 1000, 1, "")


def step(number, loss=0.5, *, step_s=0.1, shares=(0.7, 0.2, 0.1)):
    return StepDone(number, 0, loss, 0.1, 640.0, step_s, *shares, 1.0)


def timeline(rank, *, steps=8, offset_s=0.0):
    spans = []
    for number in range(steps):
        begin_s = offset_s + 0.1 * number
        spans.append(Span("backward", "compute", begin_s, begin_s + 0.06, number))
        spans.append(Span(f"bucket {number % 2}", "comm", begin_s + 0.03, begin_s + 0.08, number))
    return Timeline(rank, tuple(spans))


def run(name="run", *, losses=(1.0, 0.5, 0.25), accuracy=0.9, ranks=2):
    logged = [step(number, loss) for number, loss in enumerate(losses, start=1)]
    last = losses[-1] if losses else math.nan
    return RunRecord(
        name=name,
        events=[
            start(name),
            *logged,
            EvalDone(3, 0, last, accuracy),
            RunEnded(len(losses), 2.5, last, accuracy, 640.0),
        ],
        timelines=[timeline(rank) for rank in range(ranks)],
        facts={"model": "cnn"},
        config_toml='[model]\nkind = "cnn"',
    )
