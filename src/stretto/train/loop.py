"""The training loop, on one screen.

::

    batches       next global batch, this rank's share of it      (data wait)
    agreement     begins: samples read, stop asked for            (hidden behind forward)
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
from stretto.train.agreement import Agreement
from stretto.train.evaluate import evaluate
from stretto.train.meter import Meter
from stretto.train.parts import Parts
from stretto.train.reading import Reading
from stretto.train.state import save_state
from stretto.train.step import accumulate, shares, update


def train(parts: Parts, first_step: int = 0, agreement: Agreement | None = None) -> RunEnded:
    """Run the steps from ``first_step`` to the end; all ranks call this together.

    A request to stop, to any rank, ends the run for all of them after the step in which they
    agreed on it, with a checkpoint.
    """
    config, strategy = parts.config, parts.strategy
    agreement = agreement or Agreement(parts.channel)
    strategy.reads_gradients = config.clip_norm is not None
    meter, reading = Meter(parts, first_step), Reading(parts)
    result: EvalDone | None = None
    stopped = ""
    with Prefetch(parts.source, shares(parts, first_step)) as batches:
        for step, batch in enumerate(batches, first_step):
            with meter.step(batch):
                lr = parts.rate_at(step)
                loss = accumulate(parts, step, batch, lr, agreement)
                with meter.communicating():
                    agreed = strategy.after_backward()
                update(parts, step, agreed)
                strategy.after_update()
            settled = agreement.settled()
            meter.add(loss, settled)
            is_last = step + 1 == parts.total_steps
            stopped = "" if is_last else settled.stop
            if stopped or parts.is_due(config.log_every, step):
                done = meter.summary(lr)
                parts.report(done)
                _check_finite(done)
            if parts.is_due(config.eval_every, step):
                result = evaluate(parts, step + 1)
                parts.report(result)
                parts.judge(result)
            stopped = stopped or ("" if is_last else parts.watch.verdict)
            if (stopped or parts.is_due(None, step)) and (read := reading.account(step + 1)):
                parts.report(read)
            if parts.checkpoints and (stopped or parts.is_due(config.save_every, step)):
                save_state(parts, step + 1)
            if stopped:
                break
    ended = meter.ended(result, stopped, again=bool(stopped and settled.stop))
    parts.report(ended)
    return ended


def _check_finite(done: StepDone) -> None:
    if not math.isfinite(done.loss):
        raise StrettoError(
            f"the loss is {done.loss} after step {done.step}, on all ranks alike: lower "
            "optim.lr or lengthen optim.warmup_steps; checkpoints hold finite weights only"
        )
