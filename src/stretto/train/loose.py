"""The agreement of ranks that have models of their own: nobody waits for the slowest in a step.

What must be known at once is a function of the step, or a rank's own affair::

    samples of a step    those that are expected of it
    a loss not finite    this rank leaves its own update out, and takes part in rounds all the same

What all ranks must do after the same step (stop; act on a step that was left out) is told in a sum
that begins with one step and is read `LAG` steps later. A rank waits only when it is that far ahead
of the slowest. Where ranks meet anyway, they know everything.
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from torch import Tensor

from stretto.comm.channel import Pending
from stretto.comm.small import gather_text
from stretto.train.agreement import (
    Agreement,
    Control,
    Note,
    Settled,
    request_votes,
    stop_in_words,
)

LAG = 8
"""Steps by which a rank may be ahead of the slowest; as many until all stop."""


class LooseAgreement:
    """Has the moments of `Agreement`, and meets the others in none of them but `take_notes`."""

    lag = LAG

    def __init__(self, control: Control, expected: Callable[[int], int]) -> None:
        """Make it; ``expected`` says how many samples all ranks together have in a step."""
        self._control = control
        self._expected = expected
        self._under_way: deque[tuple[Tensor, Pending]] = deque()
        self._settled = Settled(0)
        self._stop = ""
        self._noted = False
        self._notes: list[Note] = []
        self._told = 0
        self.mine_is_not_finite = False
        """Of the step judged last, whether this rank's loss was."""

    def begin(self, step: int, num_samples: int) -> None:
        """Begin to tell what happened until now; hear what was told `LAG` steps ago."""
        self._control.tell_step(step)
        news = float(len(self._notes) > self._told)
        self._told = len(self._notes)
        sums = torch.tensor([*request_votes(self._control), news], dtype=torch.float64)
        self._under_way.append((sums, self._control.channel.start_all_reduce(sums)))
        asked_s = time.monotonic()
        self._catch_up(LAG)
        self._settled = Settled(self._expected(step), self._stop, time.monotonic() - asked_s)

    def judge(self, loss: Tensor) -> None:
        """Note whether this rank's loss of the step is finite."""
        self.mine_is_not_finite = not math.isfinite(float(loss))

    def sound(self) -> bool:
        """Return whether this rank's loss is finite."""
        return not self.mine_is_not_finite

    def all_agree(self, mine: bool) -> bool:
        """Return what this rank says: it is asked about its own gradients."""
        return mine

    def settled(self) -> Settled:
        """Return what is known of the step."""
        return self._settled

    def note(self, note: Note) -> None:
        """Keep why this rank left a step out, until all know it."""
        self._notes.append(replace(note, rank=self._control.channel.rank))

    def take_notes(self, *, meet: bool) -> list[Note]:
        """Return the steps left out that all ranks know of, once; the same on all of them.

        They tell each other where somebody has something to tell, or if they ``meet`` anyway.
        """
        if meet or self._stop:
            self._catch_up(0)  # all have begun the same sums
        elif not self._noted:
            return []
        self._settled = replace(self._settled, stop=self._stop)
        mine = json.dumps([asdict(note) for note in self._notes])
        self._notes, self._told, self._noted = [], 0, False
        told = gather_text(mine, self._control.channel)
        notes = [Note(**note) for text in told for note in json.loads(text)]
        return sorted(notes, key=lambda note: note.step)

    def _catch_up(self, most: int) -> None:
        """Hear sums until at most so many are under way."""
        while len(self._under_way) > most:
            sums, pending = self._under_way.popleft()
            pending.wait()
            *votes, news = sums.tolist()
            self._stop = self._stop or stop_in_words(votes)
            self._noted = self._noted or bool(news)


AnyAgreement = Agreement | LooseAgreement
