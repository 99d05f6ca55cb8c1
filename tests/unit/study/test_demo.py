"""What a demo says of its runs: exact strategies learn the same, own models come near."""

import math

import pytest

from stretto.report.records import RunRecord
from stretto.study.demo import compare, verdict
from stretto.telemetry.events import RunEnded, StepDone


def record(losses, accuracy, seconds=2.0):
    steps = [
        StepDone(step + 1, 0, loss, 0.1, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
        for step, loss in enumerate(losses)
    ]
    end = RunEnded(
        len(losses), seconds=seconds, loss=losses[-1], accuracy=accuracy, samples_per_s=1.0
    )
    return RunRecord("run", [*steps, end])


@pytest.mark.parametrize(
    ("strategy", "losses", "accuracy", "holds", "says"),
    [
        ("allreduce", [2.0, 1.01], 0.9, True, "learned the same: their losses never differ"),
        ("allreduce", [2.0, 1.2], 0.9, False, "did NOT learn the same"),
        ("allreduce", [2.0, 1.0], 0.8, False, "did NOT learn the same"),
        ("crossover", [2.0, 1.5], 0.85, True, "each with a model of its own, came near"),
        ("crossover", [2.0, 1.0], 0.7, False, "did NOT come near"),
        ("crossover", [2.0, 1.0], math.nan, False, "did NOT come near"),
    ],
)
def test_a_run_is_judged_by_what_its_strategy_promises(strategy, losses, accuracy, holds, says):
    one = compare(record([2.0, 1.0], 0.9), record(losses, accuracy), strategy, 4)
    assert one.holds == holds
    assert says in verdict([one])
    assert f"4 workers ({strategy})" in verdict([one])
