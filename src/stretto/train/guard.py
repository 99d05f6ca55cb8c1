"""The finite guard: no step changes the model unless it is finite, on every rank.

::

    keep          batch statistics, before forward touches them
    agree         is every rank's loss finite?      (asked when forward ends, hidden by backward)
                  are the summed gradients?         (only where the strategy leaves them whole)
    leave_out     name the layer, undo what the step has left behind
    follow        once all know: as train.not_finite says, stop, skip, roll back

All ranks hear one verdict, so they leave the same steps out and end alike. Ranks with models of
their own leave out each its own steps, and act on them together, some steps later. In fp16 an
overflow is expected now and then: the scale of the loss is halved, and only that step is left out.
"""

import math
from collections.abc import Sequence
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from stretto.data.loader import LoadedShare
from stretto.errors import StrettoError
from stretto.strategy import Agreed
from stretto.telemetry.events import StepLeftOut
from stretto.train.agreement import Agreement, Control, Note
from stretto.train.culprit import name_culprit, name_own_culprit
from stretto.train.loose import AnyAgreement, LooseAgreement
from stretto.train.parts import Parts
from stretto.train.settled import settled
from stretto.train.state import first_not_finite, go_back_, save_state


class NameCulprit(Protocol):
    """Finds words for what was met where; ``mine`` says that it was in this rank's own loss."""

    def __call__(self, parts: Parts, step: int, batch: LoadedShare, *, mine: bool) -> str:
        """Return them."""
        ...


def guarded(parts: Parts, control: Control) -> "tuple[AnyAgreement, Guard]":
    """Return how ranks agree, and the guard that goes by it.

    What several ranks step by is judged by all in every step; what one rank does, by that rank.
    """
    if parts.strategy.alone:
        loose = LooseAgreement(control, parts.samples_of)
        return loose, Guard(parts, loose, name_own_culprit)
    agreement = Agreement(control)
    return agreement, Guard(parts, agreement, name_culprit)


class Guard:
    """Judges steps, and remembers what was left out."""

    def __init__(self, parts: Parts, agreement: AnyAgreement, name: NameCulprit) -> None:
        self._parts = parts
        self._agreement = agreement
        self._name = name
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

    def leave_out(self, step: int, batch: LoadedShare) -> None:
        """Undo what ``step`` left behind, and note why."""
        if step in self._barred:
            self._undo()
            return
        scale = self._parts.scale
        if scale.may_fall and self._losses_finite:  # losses are judged before they are scaled
            before = scale.value
            scale.judge(finite=False)
            words = f"overflow at a loss scale of {before:g}, now {scale.value:g}"
            note = Note(step, words, serious=False)
        else:
            mine = self._agreement.mine_is_not_finite
            note = Note(step, self._name(self._parts, step, batch, mine=mine))
        self._undo()
        self._agreement.note(note)

    def follow(self, step: int, *, meet: bool) -> int | None:
        """Act, after ``step``, on steps left out that all know of; return the step to go back to.

        All ranks call this together, and tell each other where they ``meet`` anyway.

        Raises:
            StrettoError: The run's policy, or its patience, says that it ends here.
        """
        notes = self._agreement.take_notes(meet=meet)
        serious = [note for note in notes if note.serious]
        for note in notes:
            if not note.serious:
                self._tell(note.step, str(note))
        if not serious:
            return None
        self._left_out += len(serious)
        config = self._parts.config
        if config.not_finite == "stop" or self._left_out > config.not_finite_limit:
            self._stop(step, serious[-1], str(serious[-1]))
        if config.not_finite == "skip":
            for note in serious:
                self._tell(note.step, f"{note}; the step is left out")
            return None
        return self._go_back(step, serious)

    def _go_back(self, step: int, serious: Sequence[Note]) -> int:
        words = "; ".join(str(note) for note in serious)
        passed_over: list[str] = []
        back = go_back_(self._parts, log=passed_over.append)
        if back is None:
            self._stop(step, serious[-1], f"{words}; there is no checkpoint to go back to")
        mine = (None, self._parts.channel.rank)
        self._barred.update(note.step for note in serious if note.rank in mine)
        back_to = f"back to the checkpoint of step {back}, to leave it out then"
        self._tell(serious[-1].step, "; ".join([words, *passed_over, back_to]))
        return back

    def _stop(self, step: int, note: Note, words: str) -> NoReturn:
        """End the run, what all ranks have made saved; on all ranks alike."""
        many = f" ({self._left_out} such steps)" if self._left_out > 1 else ""
        # Who goes on by themselves have made this step; one model has not.
        made = step if note.rank is None else step + 1
        kept = "No model has changed by it"
        with settled(self._parts):
            lost = first_not_finite(self._parts.model)
        if lost:
            kept = "Its weights were lost in an earlier step: --resume goes back to a checkpoint"
        elif made and self._parts.checkpoints is not None:
            save_state(self._parts, made)
        advice = "lower optim.lr, lengthen the warm-up or mend the data"
        if self._parts.config.not_finite == "stop":
            advice += ', or set train.not_finite = "skip"'
        raise StrettoError(
            f"step {note.step + 1} is not finite{many}: {words}. {kept}; {advice}. If --resume "
            "ends the same way, weights had diverged before: start from an earlier checkpoint"
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
