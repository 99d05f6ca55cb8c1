"""Two small sums a step, so that all ranks know the same of it.

The first (samples read, stop asked for) starts when the share is loaded and is needed when backward
begins, so that forward hides it. The second (losses that are not finite) starts when forward ends
and is needed before the update, so that backward hides it. On a channel of their own they never
come between a strategy's messages. Ranks with models of their own need not meet in every step: see
`stretto.train.loose`.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.comm.channel import Channel, Pending

STOP_WORDS = ("TERM", "INT", "USR1", "USR2")
"""Signals that ask a run to stop; a request is one of these words."""


@dataclass(frozen=True, slots=True)
class Control:
    """What a rank agrees with the others over, and whom it asks and tells meanwhile."""

    channel: Channel
    asked: Callable[[], str | None] = lambda: None
    """Returns the word by which this rank was asked to stop, if it was."""
    tell_step: Callable[[int], None] = lambda _step: None
    """Takes the step that begins."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What all ranks know of a step."""

    num_samples: int
    """Samples of this step over all ranks, by which losses are divided."""
    stop: str = ""
    """Who was asked to stop, and how, as words; empty when nobody was."""
    wait_s: float = 0.0
    """How long this rank stood still for the answer: for the slowest to have its samples."""


@dataclass(frozen=True, slots=True)
class Note:
    """A step that was left out, and why."""

    step: int
    words: str
    serious: bool = True
    """Whether it counts against the run's patience; an overflow of fp16 does not."""
    rank: int | None = None
    """Who left it out; None: all ranks."""

    def __str__(self) -> str:
        """Return why, with the rank that is meant."""
        return self.words if self.rank is None else f"rank {self.rank}: {self.words}"


class Agreement:
    """Asks all ranks once a step; `begin` and `settled` are called by every rank."""

    lag = 0
    """Steps after which all ranks know what one of them told."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._channel = control.channel
        self._pending: tuple[Tensor, Pending] | None = None
        self._settled = Settled(0)
        self._judged: tuple[Tensor, Pending] | None = None
        self._sound = True
        self._asking = threading.Lock()
        self._notes: list[Note] = []
        self.mine_is_not_finite = False
        """Of the step judged last, whether this rank's own loss was."""

    def begin(self, step: int, num_samples: int) -> None:
        """Tell the others how many samples this rank read, and whether it was asked to stop."""
        self._control.tell_step(step)
        mine = [float(num_samples), *request_votes(self._control)]
        sums = torch.tensor(mine, dtype=torch.float64)
        self._pending = (sums, self._channel.start_all_reduce(sums))

    def judge(self, loss: Tensor) -> None:
        """Tell the others whether this rank's loss of the step is finite; once a step."""
        self.mine_is_not_finite = not math.isfinite(float(loss))
        votes = torch.tensor([float(self.mine_is_not_finite)], dtype=torch.float64)
        self._judged = (votes, self._channel.start_all_reduce(votes))

    def sound(self) -> bool:
        """Return whether the losses of all ranks are finite; on any thread, after `judge`."""
        with self._asking:
            if self._judged is not None:
                votes, pending = self._judged
                pending.wait()
                self._sound, self._judged = not bool(votes), None
            return self._sound

    def all_agree(self, mine: bool) -> bool:
        """Return whether every rank says so; all ranks call this together."""
        votes = torch.tensor([float(not mine)], dtype=torch.float64)
        self._channel.start_all_reduce(votes).wait()
        return not bool(votes)

    def settled(self) -> Settled:
        """Return what the ranks agreed on; may be asked again."""
        if self._pending is not None:
            sums, pending = self._pending
            asked_s = time.monotonic()
            pending.wait()
            wait_s = time.monotonic() - asked_s
            num_samples, *votes = sums.tolist()
            self._settled = Settled(int(num_samples), stop_in_words(votes), wait_s)
            self._pending = None
        return self._settled

    def note(self, note: Note) -> None:
        """Keep why a step was left out; all ranks do so alike."""
        self._notes.append(note)

    def take_notes(self, *, meet: bool) -> list[Note]:
        """Return the steps left out that all ranks know of, once; they need not meet for it."""
        notes, self._notes = self._notes, []
        return notes


def request_votes(control: Control) -> list[float]:
    """Return a vote for the word by which this rank was asked to stop, and its rank."""
    word = control.asked()
    return [*(float(word == known) for known in STOP_WORDS), control.channel.rank if word else 0.0]


def stop_in_words(sums: list[float]) -> str:
    """Return who was asked to stop, from the sums of all ranks' votes; empty: nobody."""
    *votes, ranks = (int(value) for value in sums)
    if not any(votes):
        return ""
    # The sum of the ranks names the one rank that was asked; of several it says nothing.
    who = f"rank {ranks}" if sum(votes) == 1 else f"{sum(votes)} ranks"
    words = " and ".join(word for word, count in zip(STOP_WORDS, votes, strict=True) if count)
    return f"stopped by {words} to {who}"
