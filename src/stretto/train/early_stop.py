"""Early stopping: end a run when its evaluations have not improved for long enough.

The ranks need no communication for this. An evaluation's loss and accuracy are sums over all ranks
with equal bits on each, so the same rule gives the same result everywhere.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from stretto.config import Config
from stretto.errors import CheckpointError, StrettoError
from stretto.telemetry.events import EvalDone


class EarlyStop(Config):
    """The ``[train.early_stop]`` table."""

    metric: Literal["loss", "accuracy"] = "loss"
    """The metric to improve: the loss by falling, the accuracy by rising."""
    patience: int = Field(ge=1)
    """The run ends after this many evaluations in a row without improvement."""
    min_delta: float = Field(default=0.0, ge=0)
    """A value counts as better only if it improves by more than this."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The evaluations of a run so far, under one metric."""

    metric: Literal["loss", "accuracy"] = "loss"
    best: float | None = None
    """None before the first finite value."""
    best_step: int = 0
    since_best: int = 0
    """Evaluations since the best one."""


def add_evaluation(rule: EarlyStop, tally: Tally, result: EvalDone) -> Tally:
    """Return ``tally`` with one more evaluation; a value that is not finite is never better."""
    value = result.loss if rule.metric == "loss" else result.accuracy
    if value is None:
        raise StrettoError(
            f"the evaluation after step {result.step} has no accuracy for train.early_stop to "
            'watch: set train.early_stop.metric="loss"'
        )
    if _is_better(rule, value, tally.best):
        return Tally(rule.metric, value, result.step)
    return Tally(rule.metric, tally.best, tally.best_step, tally.since_best + 1)


def stop_reason(rule: EarlyStop, tally: Tally) -> str:
    """Return why the run ends, or "" while it continues."""
    if tally.since_best < rule.patience:
        return ""
    best = "was never finite"
    if tally.best is not None:
        best = f"was best after step {tally.best_step} ({tally.best:.4g})"
    return f"stopped early: {rule.metric} {best}, in {tally.since_best} evaluations none was better"


class EarlyStopper:
    """Applies the rule to the evaluations of a run; without a rule it never stops the run."""

    def __init__(self, rule: EarlyStop | None = None) -> None:
        self._rule = rule
        self._tally = Tally(rule.metric) if rule else Tally()

    @property
    def stop_reason(self) -> str:
        """Why the run ends, "" while it continues; the same on every rank."""
        return stop_reason(self._rule, self._tally) if self._rule else ""

    def observe(self, result: EvalDone) -> None:
        """Add an evaluation; every rank must add the same ones."""
        if self._rule:
            self._tally = add_evaluation(self._rule, self._tally, result)

    def state_dict(self) -> dict[str, Any]:
        """Return the tally as JSON values."""
        return asdict(self._tally)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved tally; a tally of another metric is ignored."""
        try:
            tally = TypeAdapter(Tally).validate_python(dict(state))
        except ValidationError as wrong:
            first = wrong.errors(include_url=False)[0]
            raise CheckpointError(
                f"the checkpoint's tally of evaluations is invalid: {first['loc']}: {first['msg']}"
            ) from None
        if self._rule and tally.metric == self._rule.metric:
            self._tally = tally


def _is_better(rule: EarlyStop, value: float, best: float | None) -> bool:
    if best is None or not math.isfinite(value):
        return math.isfinite(value)
    gain = best - value if rule.metric == "loss" else value - best
    return gain > rule.min_delta
