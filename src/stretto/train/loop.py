"""The training loop, on one screen.

::

    batches       next global batch, this rank's share of it      (data wait)
    accumulate    strategy.begin, forward, backward per micro-batch
    after_backward   the strategy makes gradients agree           (exposed communication)
    step          optimizer update
    after_update  the strategy makes parameters agree
    report, evaluate, save    when due
"""

import math

from stretto.data.loader import Prefetch
from stretto.errors import StrettoError
from stretto.telemetry.events import EvalDone, RunEnded, StepDone
from stretto.train.evaluate import evaluate
from stretto.train.meter import Meter
from stretto.train.parts import Parts
from stretto.train.state import save_state
from stretto.train.step import accumulate, shares, update


def train(parts: Parts, first_step: int = 0) -> RunEnded:
    """Run the steps from ``first_step`` to the end; all ranks call this together."""
    config, strategy = parts.config, parts.strategy
    strategy.reads_gradients = config.clip_norm is not None
    meter = Meter(parts, first_step)
    result: EvalDone | None = None
    with Prefetch(parts.source, shares(parts, first_step)) as batches:
        for step, batch in enumerate(batches, first_step):
            with meter.step(batch):
                lr = parts.rate_at(step)
                loss = accumulate(parts, step, batch, lr)
                with meter.communicating():
                    agreed = strategy.after_backward()
                update(parts, step, agreed)
                strategy.after_update()
            meter.add_loss(loss)
            if parts.is_due(config.log_every, step):
                done = meter.summary(lr)
                parts.report(done)
                _check_finite(done)
            if parts.is_due(config.eval_every, step):
                result = evaluate(parts, step + 1)
                parts.report(result)
            if parts.checkpoints and parts.is_due(config.save_every, step):
                save_state(parts, step + 1)
    ended = meter.ended(result)
    parts.report(ended)
    return ended


def _check_finite(done: StepDone) -> None:
    if not math.isfinite(done.loss):
        raise StrettoError(
            f"the loss is {done.loss} after step {done.step}, on all ranks alike: lower "
            "optim.lr or lengthen optim.warmup_steps; checkpoints hold finite weights only"
        )
