"""The training loop, on one screen.

::

    batches       next global batch, this rank's share of it      (data wait)
    agreement     begins: samples read, stop asked for            (hidden behind forward)
    accumulate    strategy.begin, forward, backward per micro-batch
    guard.agree   are all losses finite? strategy.after_backward  (exposed communication)
    update        optimizer step; or the step is left out
    after_update  the strategy makes parameters agree
    report, evaluate, save    when due
"""

from stretto.telemetry.events import EvalDone, RunEnded
from stretto.train.agreement import Agreement
from stretto.train.evaluate import evaluate
from stretto.train.guard import Guard
from stretto.train.meter import Meter
from stretto.train.parts import Parts
from stretto.train.reading import Reading
from stretto.train.state import save_state
from stretto.train.step import accumulate, update
from stretto.train.steps import Steps


def train(parts: Parts, first_step: int = 0, agreement: Agreement | None = None) -> RunEnded:
    """Run the steps from ``first_step`` to the end; all ranks call this together.

    A request to stop, to any rank, ends the run for all of them after the step in which they
    agreed on it, with a checkpoint.
    """
    config, agreement = parts.config, agreement or Agreement(parts.channel)
    parts.strategy.reads_gradients = config.reads_gradients
    meter, reading, guard = Meter(parts, first_step), Reading(parts), Guard(parts, agreement)
    result: EvalDone | None = None
    stopped = ""
    with Steps(parts, first_step) as steps:
        for step, batch in steps:
            with meter.step(batch):
                lr = parts.rate_at(step)
                guard.keep()
                loss = accumulate(parts, step, batch, lr, agreement)
                with meter.communicating():
                    agreed = guard.agree(step)
                if agreed is not None:
                    update(parts, step, agreed)
                    parts.strategy.after_update()
            settled = agreement.settled()
            if agreed is None and (earlier := guard.leave_out(step, batch)) is not None:
                steps.go_back(earlier)
                meter.go_back(earlier)
                continue
            meter.add(loss, settled, agreed)
            is_last = step + 1 == parts.total_steps
            stopped = "" if is_last else settled.stop
            if stopped or parts.is_due(config.log_every, step):
                parts.report(meter.summary(lr))
            if parts.is_due(config.eval_every, step):
                result = evaluate(parts, step + 1)
                parts.report(result)
                parts.judge(result)
            stopped = stopped or ("" if is_last else parts.watch.verdict)
            if (stopped or parts.is_due(None, step)) and (read := reading.account(step + 1)):
                parts.report(read)
            is_due = agreed is not None and parts.is_due(config.save_every, step)
            if parts.checkpoints and (stopped or is_due or is_last):
                save_state(parts, step + 1)
            if stopped:
                break
    ended = meter.ended(result, stopped, again=bool(stopped and settled.stop))
    parts.report(ended)
    return ended
