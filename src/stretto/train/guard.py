"""The finite guard: no step changes the model unless it is finite, on every rank.

::

    keep          batch statistics, before forward touches them
    agree         is every rank's loss finite?      (asked when forward ends, hidden by backward)
                  are the summed gradients?         (only where the strategy leaves them whole)
    leave_out     name the layer, then as train.not_finite says: stop, skip, roll back

All ranks hear one verdict, so they leave the same steps out and end alike. In fp16 an overflow is
expected now and then: the scale of the loss is halved, and only that step is left out.
"""

import math
from typing import NoReturn

import torch
from torch import Tensor

from stretto.data.loader import LoadedShare
from stretto.errors import StrettoError
from stretto.strategy import Agreed
from stretto.telemetry.events import StepLeftOut
from stretto.train.agreement import Agreement
from stretto.train.culprit import name_culprit
from stretto.train.parts import Parts
from stretto.train.state import first_not_finite, go_back_, save_state


class Guard:
    """Judges steps, and remembers what was left out."""

    def __init__(self, parts: Parts, agreement: Agreement) -> None:
        self._parts = parts
        self._agreement = agreement
        parts.strategy.sound = agreement.sound
        self._buffers = [b for b in parts.model.buffers() if b.numel()]
        self._kept: list[Tensor] = [torch.empty_like(buffer) for buffer in self._buffers]
        self._kept_own: dict[str, Tensor] = {}
        self._losses_finite = True
        self._barred: set[int] = set()
        self._left_out = 0

    @torch.no_grad()
    def keep(self) -> None:
        """Note the buffers and what the strategy keeps: of a step left out nothing must stay."""
        self._kept_own = self._parts.strategy.undoable()
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            kept.copy_(buffer)

    def agree(self, step: int) -> Agreed | None:
        """Let the strategy make gradients agree; None where the step is to be left out."""
        self._losses_finite = self._agreement.sound()
        sound = self._losses_finite and step not in self._barred
        agreed = self._parts.strategy.after_backward(update=sound)
        return agreed if sound and self._finite(agreed) else None

    def _finite(self, agreed: Agreed) -> bool:
        """Say whether the step's gradients are finite on all ranks; unscale them on the way.

        Where they have been used already there is nothing to judge: the next loss will tell.
        """
        scale = self._parts.scale
        if not self._parts.strategy.reads_gradients:
            return True
        agreed.divide_(scale.value)
        finite = self._agreement.all_agree(math.isfinite(float(agreed.norm())))
        if finite:
            scale.judge(finite=True)
        return finite

    def leave_out(self, step: int, batch: LoadedShare) -> int | None:
        """Undo what ``step`` left behind; return the step to go on with, if that is another one.

        Raises:
            StrettoError: The run's policy, or its patience, says that it ends here.
        """
        if step in self._barred:
            self._undo()
            return None
        scale, config = self._parts.scale, self._parts.config
        if scale.may_fall and self._losses_finite:  # losses are judged before they are scaled
            before = scale.value
            scale.judge(finite=False)
            self._undo()
            self._tell(step, f"overflow at a loss scale of {before:g}, now {scale.value:g}")
            return None
        words = name_culprit(self._parts, step, batch, mine=self._agreement.mine_is_not_finite)
        self._undo()
        self._left_out += 1
        if config.not_finite == "stop" or self._left_out > config.not_finite_limit:
            self._stop(step, words)
        if config.not_finite == "skip":
            self._tell(step, f"{words}; the step is left out")
            return None
        passed_over: list[str] = []
        back = go_back_(self._parts, log=passed_over.append)
        if back is None:
            self._stop(step, f"{words}; there is no checkpoint to go back to")
        self._barred.add(step)
        back_to = f"back to the checkpoint of step {back}, to leave it out then"
        self._tell(step, "; ".join([words, *passed_over, back_to]))
        return back

    def _stop(self, step: int, words: str) -> NoReturn:
        """End the run, the weights of the step before saved; on all ranks alike."""
        many = f" ({self._left_out} such steps)" if self._left_out > 1 else ""
        kept = "The model is as it was before"
        if first_not_finite(self._parts.model):
            kept = "Its weights were lost in an earlier step: --resume goes back to a checkpoint"
        elif step and self._parts.checkpoints is not None:
            save_state(self._parts, step)
        advice = "lower optim.lr, lengthen the warm-up or mend the data"
        if self._parts.config.not_finite == "stop":
            advice += ', or set train.not_finite = "skip"'
        raise StrettoError(
            f"step {step + 1} is not finite{many}: {words}. {kept}; {advice}. If --resume ends the "
            "same way, weights had diverged before: start from an earlier checkpoint"
        )

    @torch.no_grad()
    def _undo(self) -> None:
        """Drop the step's gradients and statistics, and what a wire that sends later has kept."""
        self._parts.optimizer.zero_grad(set_to_none=True)
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            buffer.copy_(kept)
        if self._kept_own:
            self._parts.strategy.load_own_state(self._kept_own)

    def _tell(self, step: int, words: str) -> None:
        self._parts.report(StepLeftOut(step + 1, words))
