"""The finite check: a step whose loss or gradients are not finite never changes the model.

::

    save_rollback_state    copy batch statistics before forward changes them
    sync_gradients         is every rank's loss finite?     (sent after forward, hidden by backward)
                           are the summed gradients?        (only if the strategy keeps them whole)
    skip_step              name the layer, undo what the step changed
    handle_skipped_steps   once all ranks know: stop, skip or roll back (train.not_finite)

All ranks get the same result, so they skip the same steps and end alike. If replicas differ, each
rank skips its own steps, and all ranks act on them together some steps later. In fp16 an overflow
is expected now and then: the loss scale is halved, and only that step is skipped.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn

from stretto.comm.transport import all_gather_text
from stretto.data.loader import LoadedSamples
from stretto.errors import StrettoError
from stretto.models import per_sample_loss
from stretto.program.blocks import parameters_in_backward_order
from stretto.strategies import StepGradients
from stretto.telemetry.events import StepSkipped
from stretto.train.run_parts import RunParts
from stretto.train.state import (
    consolidated_model,
    first_nonfinite_parameter,
    roll_back_,
    save_state,
)
from stretto.train.step import forward, micro_batches, seed_randomness
from stretto.train.step_consensus import (
    AnyConsensus,
    ControlPlane,
    DelayedConsensus,
    SkippedStep,
    StepConsensus,
)

T = TypeVar("T")


def locate_nan(parts: RunParts, step: int, batch: LoadedSamples, *, found_here: bool) -> str:
    """Return which rank, layer or parameter first had a value that is not finite.

    The text is the same on every rank; all ranks call this together. The rank whose loss was not
    finite runs forward again to find the layer. ``found_here`` is whether this rank's own loss was
    not finite. If no rank's was, gradients are examined.
    """
    if not any(_all_gather_object(found_here, parts)):
        return locate_nan_in_gradients(parts)
    parts.strategy.consolidate()  # forward may need shards of other ranks
    findings = _all_gather_object(
        locate_nan_in_forward(parts, step, batch) if found_here else "", parts
    )
    reports = [f"rank {rank}: {finding}" for rank, finding in enumerate(findings) if finding]
    more = f" ({len(reports)} ranks in all)" if len(reports) > 1 else ""
    return reports[0] + more


def locate_nan_in_gradients(parts: RunParts) -> str:
    """Return the first parameter, in backward order, whose gradient is not finite.

    Every rank examines the gradients it holds; all ranks call this together.
    """
    return _describe_first(
        parts,
        {
            name
            for names in _all_gather_object(_nonfinite_gradients(parts), parts)
            for name in names
        },
    )


def locate_local_nan(parts: RunParts, step: int, batch: LoadedSamples, *, found_here: bool) -> str:
    """Return what `locate_nan` does, for this rank alone and without communication.

    It is used if replicas differ, because each rank then skips its own steps.
    """
    if found_here:
        return locate_nan_in_forward(parts, step, batch)
    return _describe_first(parts, set(_nonfinite_gradients(parts)))


def _nonfinite_gradients(parts: RunParts) -> list[str]:
    """Return the names of the parameters whose gradient on this rank is not finite."""
    named = parts.strategy.named_gradients()
    return sorted({name for name, gradient in named if not _is_finite(gradient)})


def _describe_first(parts: RunParts, nonfinite_names: set[str]) -> str:
    for name, _ in parameters_in_backward_order(parts.model):
        if name in nonfinite_names:
            return f"losses are finite, the gradient of {name} is not"
    return "losses are finite, and so is every gradient by now"


def _all_gather_object(local_value: T, parts: RunParts) -> list[T]:
    """Return the value of every rank, in the order of ranks; all ranks call this together."""
    return [json.loads(text) for text in all_gather_text(json.dumps(local_value), parts.transport)]


@torch.no_grad()
def locate_nan_in_forward(parts: RunParts, step: int, batch: LoadedSamples) -> str:
    """Run this rank's forward of ``step`` again; return where values first become non-finite."""
    if not _is_finite(batch.inputs):
        return "the samples themselves are not finite"
    if name := first_nonfinite_parameter(parts.model):
        return f"parameter {name} was not finite before forward"
    for micro, (inputs, targets) in enumerate(micro_batches(parts, batch)):
        if not len(inputs):
            continue
        seed_randomness(parts.seed, step, micro, parts.transport.rank)
        with _record_nonfinite_outputs(parts.model) as nonfinite_layers:
            smoothing = parts.config.label_smoothing
            losses = per_sample_loss(forward(parts, inputs), targets, smoothing)
        if nonfinite_layers:
            name, kind = next(iter(nonfinite_layers.items()))
            return f"layer {name} ({kind}) gives the first output that is not finite"
        if not _is_finite(losses):
            return "every layer's output is finite, the loss is not"
    return "the loss was not finite, but is when it is computed again"


@contextmanager
def _record_nonfinite_outputs(model: nn.Module) -> Iterator[Mapping[str, str]]:
    """Yield the layers whose output is not finite, innermost first, in the order they ran."""
    nonfinite_layers: dict[str, str] = {}

    def check_output(name: str, module: nn.Module, output: object) -> None:
        tensors = output if isinstance(output, tuple | list) else (output,)
        if any(isinstance(t, Tensor) and not _is_finite(t) for t in tensors):
            nonfinite_layers.setdefault(name or "the model itself", type(module).__name__)

    hooks = [
        module.register_forward_hook(
            lambda m, _inputs, output, name=name: check_output(name, m, output)
        )
        for name, module in model.named_modules()
    ]
    try:
        yield nonfinite_layers
    finally:
        for hook in hooks:
            hook.remove()


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


class NanLocator(Protocol):
    """Describes the source of a non-finite value: `locate_nan` or `locate_local_nan`."""

    def __call__(
        self, parts: RunParts, step: int, batch: LoadedSamples, *, found_here: bool
    ) -> str:
        """Return the description; ``found_here`` is whether this rank's own loss was not finite."""
        ...


def make_consensus_and_check(
    parts: RunParts, control: ControlPlane
) -> "tuple[AnyConsensus, FiniteCheck]":
    """Return the consensus of a run's ranks, and the finite check that uses it.

    If a step is common to several ranks, all of them check it together in every step. If each rank
    makes its own steps, it checks them alone.
    """
    if parts.strategy.ranks_step_independently:
        delayed = DelayedConsensus(control, parts.num_samples_in_step)
        return delayed, FiniteCheck(parts, delayed, locate_local_nan)
    consensus = StepConsensus(control)
    return consensus, FiniteCheck(parts, consensus, locate_nan)


class FiniteCheck:
    """Decides about each step whether it is kept, and records skipped steps."""

    def __init__(self, parts: RunParts, consensus: AnyConsensus, nan_locator: NanLocator) -> None:
        self._parts = parts
        self._consensus = consensus
        self._locate_nan = nan_locator
        parts.strategy.is_finite = consensus.is_finite
        self._buffers = [b for b in parts.model.buffers() if b.numel()]
        self._saved_buffers: list[Tensor] = [torch.empty_like(buffer) for buffer in self._buffers]
        self._saved_local_state: dict[str, Tensor] = {}
        self._losses_are_finite = True
        self._steps_to_skip: set[int] = set()
        self._num_skipped = 0

    @torch.no_grad()
    def save_rollback_state(self) -> None:
        """Copy the buffers and the strategy's rollback state, in case the step is skipped."""
        self._saved_local_state = self._parts.strategy.rollback_state()
        for kept, buffer in zip(self._saved_buffers, self._buffers, strict=True):
            kept.copy_(buffer)

    def sync_gradients(self, step: int) -> StepGradients | None:
        """Synchronise gradients through the strategy; return None if the step must be skipped."""
        self._losses_are_finite = self._consensus.is_finite()
        is_finite = self._losses_are_finite and step not in self._steps_to_skip
        sync_result = self._parts.strategy.after_backward(update=is_finite)
        return sync_result if is_finite and self._unscale_and_check(sync_result) else None

    def _unscale_and_check(self, sync_result: StepGradients) -> bool:
        """Unscale the gradients and return whether they are finite on all ranks.

        If the strategy has already applied them, there is nothing to check; the next loss will show
        it.
        """
        loss_scale = self._parts.loss_scale
        if not self._parts.strategy.reads_gradients:
            return True
        sync_result.divide_(loss_scale.value)
        is_finite = self._consensus.all_agree(math.isfinite(float(sync_result.norm())))
        if is_finite:
            loss_scale.update(is_finite=True)
        return is_finite

    def skip_step(self, step: int, batch: LoadedSamples) -> None:
        """Undo what ``step`` changed, and record the reason."""
        if step in self._steps_to_skip:
            self._undo()
            return
        loss_scale = self._parts.loss_scale
        if (
            loss_scale.can_shrink and self._losses_are_finite
        ):  # losses are checked before they are scaled
            before = loss_scale.value
            loss_scale.update(is_finite=False)
            reason = f"overflow at a loss scale of {before:g}, now {loss_scale.value:g}"
            record = SkippedStep(step, reason, serious=False)
        else:
            found_here = self._consensus.local_loss_is_nonfinite
            record = SkippedStep(
                step, self._locate_nan(self._parts, step, batch, found_here=found_here)
            )
        self._undo()
        self._consensus.record(record)

    def handle_skipped_steps(self, step: int, *, is_sync_point: bool) -> int | None:
        """React to skipped steps that all ranks know of; return the step to go back to, if any.

        All ranks call this together, after ``step``. ``is_sync_point`` means that all ranks
        synchronise here anyway, so they exchange all records now.

        Raises:
            StrettoError: ``train.not_finite`` or ``train.not_finite_limit`` ends the run here.
        """
        skipped_steps = self._consensus.take_skipped_steps(is_sync_point=is_sync_point)
        serious = [record for record in skipped_steps if record.serious]
        for record in skipped_steps:
            if not record.serious:
                self._report_skipped(record.step, str(record))
        if not serious:
            return None
        self._num_skipped += len(serious)
        config = self._parts.config
        if config.not_finite == "stop" or self._num_skipped > config.not_finite_limit:
            self._stop(step, serious[-1], str(serious[-1]))
        if config.not_finite == "skip":
            for record in serious:
                self._report_skipped(record.step, f"{record}; the step is left out")
            return None
        return self._roll_back(step, serious)

    def _roll_back(self, step: int, serious: Sequence[SkippedStep]) -> int:
        reason = "; ".join(str(record) for record in serious)
        skipped_checkpoints: list[str] = []
        restored_step = roll_back_(self._parts, log=skipped_checkpoints.append)
        if restored_step is None:
            self._stop(step, serious[-1], f"{reason}; there is no checkpoint to go back to")
        found_here = (None, self._parts.transport.rank)
        self._steps_to_skip.update(record.step for record in serious if record.rank in found_here)
        rollback_text = f"back to the checkpoint of step {restored_step}, to leave it out then"
        self._report_skipped(
            serious[-1].step, "; ".join([reason, *skipped_checkpoints, rollback_text])
        )
        return restored_step

    def _stop(self, step: int, record: SkippedStep, reason: str) -> NoReturn:
        """Save the steps that all ranks have completed and end the run, on all ranks alike."""
        many = f" ({self._num_skipped} such steps)" if self._num_skipped > 1 else ""
        # Ranks with local steps have completed this step; with a common step nobody has.
        completed_steps = step if record.rank is None else step + 1
        kept = "The step changed no model"
        with consolidated_model(self._parts):
            nonfinite_parameter = first_nonfinite_parameter(self._parts.model)
        if nonfinite_parameter:
            kept = "Its weights were lost in an earlier step: --resume goes back to a checkpoint"
        elif completed_steps and self._parts.checkpoints is not None:
            save_state(self._parts, completed_steps)
        advice = "lower optim.lr, lengthen the warm-up or repair the data"
        if self._parts.config.not_finite == "stop":
            advice += ', or set train.not_finite = "skip"'
        raise StrettoError(
            f"step {record.step + 1} is not finite{many}: {reason}. {kept}; {advice}. If --resume "
            "ends the same way, weights had diverged before: start from an earlier checkpoint"
        )

    @torch.no_grad()
    def _undo(self) -> None:
        """Drop the step's gradients; restore batch statistics and the strategy's local state."""
        self._parts.optimizer.zero_grad(set_to_none=True)
        for kept, buffer in zip(self._saved_buffers, self._buffers, strict=True):
            buffer.copy_(kept)
        if self._saved_local_state:
            self._parts.strategy.load_local_state(self._saved_local_state)

    def _report_skipped(self, step: int, reason: str) -> None:
        self._parts.report(StepSkipped(step + 1, reason))
