"""The training loop.

::

    batches               next global batch, this rank's samples of it      (data wait)
    consensus.begin       samples read, stop requested?                     (hidden behind forward)
    forward_backward      strategy.begin, forward, backward per micro-batch
    sync_gradients        all losses finite? strategy.after_backward        (exposed communication)
    update                optimizer step; or the step is skipped
    after_update          the strategy makes parameters agree
    handle_skipped_steps  stop, skip or roll back
    report, evaluate, save    when due

If each rank makes its own steps, ranks synchronise only to evaluate and to save. What they report
to each other in between arrives some steps later (`stretto.train.step_consensus`).
"""

from stretto.data.loader import LoadedSamples
from stretto.telemetry.events import EvalDone, RunEnded
from stretto.train.batches import ReadReporter, StepBatches
from stretto.train.evaluate import evaluate
from stretto.train.finite_check import FiniteCheck, make_consensus_and_check
from stretto.train.meter import StepMeter
from stretto.train.run_parts import RunParts
from stretto.train.state import save_state
from stretto.train.step import forward_backward, update
from stretto.train.step_consensus import AnyConsensus, ControlPlane


def train(parts: RunParts, first_step: int = 0, control: ControlPlane | None = None) -> RunEnded:
    """Run the steps from ``first_step`` to the end; all ranks call this together.

    A stop request to any rank ends the run for all, with a checkpoint, after a step on which they
    agree.
    """
    config, meter, read_reporter = parts.config, StepMeter(parts, first_step), ReadReporter(parts)
    consensus, finite_check = make_consensus_and_check(
        parts, control or ControlPlane(parts.transport)
    )
    parts.strategy.reads_gradients = config.reads_gradients
    result: EvalDone | None = None
    stopped = ""
    with StepBatches(parts, first_step) as batches:
        for step, batch in batches:
            _run_step(parts, step, batch, consensus, finite_check, meter)
            is_eval_due = parts.is_due(config.eval_every, step)
            if (
                rollback_step := finite_check.handle_skipped_steps(step, is_sync_point=is_eval_due)
            ) is not None:
                batches.roll_back(rollback_step)
                meter.roll_back(rollback_step)
                continue
            is_last = step + 1 == parts.total_steps
            requested_stop = consensus.result().stop_reason
            stopped = "" if is_last else requested_stop
            is_save_due = bool(stopped) or parts.is_due(config.save_every, step)
            if stopped or parts.is_due(config.log_every, step):
                meter.begin_metrics(parts.rate_at(step))
            for metrics in meter.finished_metrics(
                0 if is_eval_due or is_save_due else consensus.lag
            ):
                parts.report(metrics)
            if is_eval_due:
                result = evaluate(parts, step + 1)
                parts.report(result)
                parts.observe_evaluation(result)
            stopped = stopped or ("" if is_last else parts.early_stopper.stop_reason)
            if (stopped or parts.is_due(None, step)) and (
                data_read := read_reporter.summarize(step + 1)
            ):
                parts.report(data_read)
            if parts.checkpoints and (stopped or is_save_due):
                save_state(parts, step + 1)
            if stopped:
                break
    run_ended = meter.run_ended(result, stopped, again=bool(stopped and requested_stop))
    parts.report(run_ended)
    return run_ended


def _run_step(
    parts: RunParts,
    step: int,
    batch: LoadedSamples,
    consensus: AnyConsensus,
    finite_check: FiniteCheck,
    meter: StepMeter,
) -> None:
    """Run one step; skip its update if it is not finite."""
    with meter.step(batch):
        finite_check.save_rollback_state()
        loss = forward_backward(parts, step, batch, parts.rate_at(step), consensus)
        with meter.time_communication():
            sync_result = finite_check.sync_gradients(step)
        if sync_result is not None:
            update(parts, step, sync_result)
        else:
            finite_check.skip_step(step, batch)
        if (
            sync_result is not None or parts.strategy.ranks_step_independently
        ):  # peers count on this rank
            parts.strategy.after_update()
    meter.add(loss, len(batch.inputs), consensus.result().wait_s, sync_result)
