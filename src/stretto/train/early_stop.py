"""Early stopping: a run ends once its evaluations have not become better for long enough.

No rank asks another: an evaluation's loss and accuracy are sums over all ranks, with equal bits on
every one of them, so the same rule comes to the same verdict everywhere.
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
    """What should get better: the loss by falling, the accuracy by rising."""
    patience: int = Field(ge=1)
    """So many evaluations in a row without a better one end the run."""
    min_delta: float = Field(default=0.0, ge=0)
    """A value is better only if it is so by more than this."""


@dataclass(frozen=True, slots=True)
class Tally:
    """How the evaluations of a run went so far, under one metric."""

    metric: Literal["loss", "accuracy"] = "loss"
    best: float | None = None
    """None before the first finite value."""
    best_step: int = 0
    since_best: int = 0
    """Evaluations after the best one."""


def judge(rule: EarlyStop, tally: Tally, result: EvalDone) -> Tally:
    """Return ``tally`` with one evaluation more; a value that is not finite is never better."""
    value = result.loss if rule.metric == "loss" else result.accuracy
    if value is None:
        raise StrettoError(
            f"the evaluation after step {result.step} has no accuracy for train.early_stop to "
            'watch: set train.early_stop.metric="loss"'
        )
    if _is_better(rule, value, tally.best):
        return Tally(rule.metric, value, result.step)
    return Tally(rule.metric, tally.best, tally.best_step, tally.since_best + 1)


def verdict(rule: EarlyStop, tally: Tally) -> str:
    """Return why the run is over, or nothing while it may go on."""
    if tally.since_best < rule.patience:
        return ""
    best = "was never finite"
    if tally.best is not None:
        best = f"was best after step {tally.best_step} ({tally.best:.4g})"
    return f"stopped early: {rule.metric} {best}, in {tally.since_best} evaluations none was better"


class Watch:
    """The tally a run keeps under its rule; without a rule it keeps none and ends nothing."""

    def __init__(self, rule: EarlyStop | None = None) -> None:
        self._rule = rule
        self._tally = Tally(rule.metric) if rule else Tally()

    @property
    def verdict(self) -> str:
        """Why the run is over, empty while it may go on; the same on every rank."""
        return verdict(self._rule, self._tally) if self._rule else ""

    def see(self, result: EvalDone) -> None:
        """Take an evaluation into account; every rank is given the same ones."""
        if self._rule:
            self._tally = judge(self._rule, self._tally, result)

    def state_dict(self) -> dict[str, Any]:
        """Return the tally as JSON values."""
        return asdict(self._tally)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved tally; one of another metric says nothing and is left aside."""
        try:
            tally = TypeAdapter(Tally).validate_python(dict(state))
        except ValidationError as wrong:
            first = wrong.errors(include_url=False)[0]
            raise CheckpointError(
                f"the checkpoint's tally of evaluations cannot be: {first['loc']}: {first['msg']}"
            ) from None
        if self._rule and tally.metric == self._rule.metric:
            self._tally = tally


def _is_better(rule: EarlyStop, value: float, best: float | None) -> bool:
    if best is None or not math.isfinite(value):
        return math.isfinite(value)
    gain = best - value if rule.metric == "loss" else value - best
    return gain > rule.min_delta
