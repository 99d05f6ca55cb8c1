"""The summary of a demo: exact strategies learn the same, others come near."""

import math

import pytest

from stretto.report.run_records import RunRecord
from stretto.studies.demo import compare_runs, summarize_comparisons
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
    ("strategy", "losses", "accuracy", "is_as_expected", "says"),
    [
        ("allreduce", [2.0, 1.01], 0.9, True, "learned the same: their losses never differ"),
        ("allreduce", [2.0, 1.2], 0.9, False, "did NOT learn the same"),
        ("allreduce", [2.0, 1.0], 0.8, False, "did NOT learn the same"),
        ("crossover", [2.0, 1.5], 0.85, True, "each with a model of its own, came near"),
        ("crossover", [2.0, 1.0], 0.7, False, "did NOT come near"),
        ("crossover", [2.0, 1.0], math.nan, False, "did NOT come near"),
    ],
)
def test_a_run_is_compared_with_what_its_strategy_promises(
    strategy, losses, accuracy, is_as_expected, says
):
    one = compare_runs(record([2.0, 1.0], 0.9), record(losses, accuracy), strategy, 4)
    assert one.is_as_expected == is_as_expected
    assert says in summarize_comparisons([one])
    assert f"4 workers ({strategy})" in summarize_comparisons([one])
