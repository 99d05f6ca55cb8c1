"""The training loop, on one screen.

::

    batches       next global batch, this rank's share of it      (data wait)
    agreement     begins: samples read, stop asked for            (hidden behind forward)
    accumulate    strategy.begin, forward, backward per micro-batch
    guard.agree   are all losses finite? strategy.after_backward  (exposed communication)
    update        optimizer step; or the step is left out
    after_update  the strategy makes parameters agree
    guard.follow  what follows from steps left out
    report, evaluate, save    when due

Ranks with models of their own meet only to evaluate and to save: what they tell each other
meanwhile is heard some steps later (`stretto.train.loose`).
"""

from stretto.data.loader import LoadedShare
from stretto.telemetry.events import EvalDone, RunEnded
from stretto.train.agreement import Control
from stretto.train.evaluate import evaluate
from stretto.train.guard import Guard, guarded
from stretto.train.loose import AnyAgreement
from stretto.train.meter import Meter
from stretto.train.parts import Parts
from stretto.train.reading import Reading
from stretto.train.state import save_state
from stretto.train.step import accumulate, update
from stretto.train.steps import Steps


def train(parts: Parts, first_step: int = 0, control: Control | None = None) -> RunEnded:
    """Run the steps from ``first_step`` to the end; all ranks call this together.

    A request to stop, to any rank, ends the run for all of them after the step in which they
    agreed on it, with a checkpoint.
    """
    config, meter, reading = parts.config, Meter(parts, first_step), Reading(parts)
    agreement, guard = guarded(parts, control or Control(parts.channel))
    parts.strategy.reads_gradients = config.reads_gradients
    result: EvalDone | None = None
    stopped = ""
    with Steps(parts, first_step) as steps:
        for step, batch in steps:
            _make(parts, step, batch, agreement, guard, meter)
            evaluates = parts.is_due(config.eval_every, step)
            if (earlier := guard.follow(step, meet=evaluates)) is not None:
                steps.go_back(earlier)
                meter.go_back(earlier)
                continue
            is_last = step + 1 == parts.total_steps
            asked = agreement.settled().stop
            stopped = "" if is_last else asked
            saves = bool(stopped) or parts.is_due(config.save_every, step)
            if stopped or parts.is_due(config.log_every, step):
                meter.begin_line(parts.rate_at(step))
            for line in meter.lines(0 if evaluates or saves else agreement.lag):
                parts.report(line)
            if evaluates:
                result = evaluate(parts, step + 1)
                parts.report(result)
                parts.judge(result)
            stopped = stopped or ("" if is_last else parts.watch.verdict)
            if (stopped or parts.is_due(None, step)) and (read := reading.account(step + 1)):
                parts.report(read)
            if parts.checkpoints and (stopped or saves):
                save_state(parts, step + 1)
            if stopped:
                break
    ended = meter.ended(result, stopped, again=bool(stopped and asked))
    parts.report(ended)
    return ended


def _make(
    parts: Parts,
    step: int,
    batch: LoadedShare,
    agreement: AnyAgreement,
    guard: Guard,
    meter: Meter,
) -> None:
    """Make one step, or leave it out."""
    with meter.step(batch):
        guard.keep()
        loss = accumulate(parts, step, batch, parts.rate_at(step), agreement)
        with meter.communicating():
            agreed = guard.agree(step)
        if agreed is not None:
            update(parts, step, agreed)
        else:
            guard.leave_out(step, batch)
        if agreed is not None or parts.strategy.alone:  # peers count on this rank
            parts.strategy.after_update()
    meter.add(loss, len(batch.inputs), agreement.settled().wait_s, agreed)
