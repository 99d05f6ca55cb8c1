"""Step consensus: small all-reduces of a step's flags, so that all ranks act alike.

`StepConsensus` makes two per step. The first (samples read, stop requested) starts when the batch
is loaded and is needed when backward begins, so that forward hides it. The second (losses that are
not finite) starts when forward ends and is needed before the update, so that backward hides it.
They have a transport of their own, so they never come between a strategy's messages.

`DelayedConsensus` is for ranks that make their own local steps and do not wait for the slowest
rank::

    samples of a step     the expected number, a function of the step
    loss is not finite    this rank skips its own update; it still takes part in averaging

Flags on which all ranks must act after the same step (stop, skipped steps) are sent in an
all-reduce that starts with one step and is read `LAG` steps later. A rank waits only if it is that
far ahead of the slowest. Where ranks synchronise anyway, all flags are known.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from stretto.comm.transport import Transport, Work, all_gather_text

STOP_SIGNAL_NAMES = ("TERM", "INT", "USR1", "USR2")
"""Signals that request a stop; a request is one of these names."""


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """The transport of the consensus, and the callbacks that connect it to its process."""

    transport: Transport
    stop_signal: Callable[[], str | None] = lambda: None
    """Returns the name of the signal that asked this rank to stop, or None."""
    on_step_begin: Callable[[int], None] = lambda _step: None
    """Called with each step that begins."""


@dataclass(frozen=True, slots=True)
class StepConsensusResult:
    """What all ranks know about a step."""

    num_samples: int
    """Samples of this step over all ranks; losses are divided by it."""
    stop_reason: str = ""
    """Which rank was asked to stop and by which signal, as text; "" if none."""
    wait_s: float = 0.0
    """Seconds this rank waited for the result: for the slowest rank to load its samples."""


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A skipped step and the reason."""

    step: int
    reason: str
    serious: bool = True
    """Whether it counts towards ``train.not_finite_limit``; an overflow of fp16 does not."""
    rank: int | None = None
    """The rank that skipped it; None: all ranks."""

    def __str__(self) -> str:
        """Return the reason, with the rank if only one rank skipped the step."""
        return self.reason if self.rank is None else f"rank {self.rank}: {self.reason}"


class StepConsensus:
    """Consensus of all ranks in every step; every rank calls `begin` and `result` once a step."""

    lag = 0
    """Steps until all ranks know a flag that one of them has sent."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._transport = control.transport
        self._work: tuple[Tensor, Work] | None = None
        self._result = StepConsensusResult(0)
        self._pending_votes: tuple[Tensor, Work] | None = None
        self._is_finite = True
        self._wait_lock = threading.Lock()
        self._skipped_steps: list[SkippedStep] = []
        self.local_loss_is_nonfinite = False
        """Whether this rank's own loss was not finite in the step checked last."""

    def begin(self, step: int, num_samples: int) -> None:
        """Start sending how many samples this rank read, and whether it was asked to stop."""
        self._control.on_step_begin(step)
        local_value = [float(num_samples), *encode_stop_request(self._control)]
        sums = torch.tensor(local_value, dtype=torch.float64)
        self._work = (sums, self._transport.start_all_reduce(sums))

    def check_finite(self, loss: Tensor) -> None:
        """Start sending whether this rank's loss of the step is finite; call it once a step."""
        self.local_loss_is_nonfinite = not math.isfinite(float(loss))
        votes = torch.tensor([float(self.local_loss_is_nonfinite)], dtype=torch.float64)
        self._pending_votes = (votes, self._transport.start_all_reduce(votes))

    def is_finite(self) -> bool:
        """Return whether the losses of all ranks are finite.

        May be called on any thread, after `check_finite`.
        """
        with self._wait_lock:
            if self._pending_votes is not None:
                votes, work = self._pending_votes
                work.wait()
                self._is_finite, self._pending_votes = not bool(votes), None
            return self._is_finite

    def all_agree(self, local_value: bool) -> bool:
        """Return whether ``local_value`` is true on every rank; all ranks call this together."""
        votes = torch.tensor([float(not local_value)], dtype=torch.float64)
        self._transport.start_all_reduce(votes).wait()
        return not bool(votes)

    def result(self) -> StepConsensusResult:
        """Return the step's result; waits in the first call of a step only."""
        if self._work is not None:
            sums, work = self._work
            wait_start_s = time.monotonic()
            work.wait()
            wait_s = time.monotonic() - wait_start_s
            num_samples, *votes = sums.tolist()
            self._result = StepConsensusResult(
                int(num_samples), describe_stop_request(votes), wait_s
            )
            self._work = None
        return self._result

    def record(self, record: SkippedStep) -> None:
        """Record a skipped step; all ranks do so alike."""
        self._skipped_steps.append(record)

    def take_skipped_steps(self, *, is_sync_point: bool) -> list[SkippedStep]:
        """Return the skipped steps that all ranks know of, once; no communication is needed."""
        skipped_steps, self._skipped_steps = self._skipped_steps, []
        return skipped_steps


def encode_stop_request(control: ControlPlane) -> list[float]:
    """Return one vote per stop signal for the one this rank received, and the rank."""
    signal_name = control.stop_signal()
    return [
        *(float(signal_name == name) for name in STOP_SIGNAL_NAMES),
        control.transport.rank if signal_name else 0.0,
    ]


def describe_stop_request(sums: list[float]) -> str:
    """Return who was asked to stop, from the summed votes of all ranks; "" if nobody was."""
    *votes, ranks = (int(value) for value in sums)
    if not any(votes):
        return ""
    # If one rank was asked, the sum of ranks is that rank; of several it is meaningless.
    recipients = f"rank {ranks}" if sum(votes) == 1 else f"{sum(votes)} ranks"
    reason = " and ".join(
        signal_name for signal_name, count in zip(STOP_SIGNAL_NAMES, votes, strict=True) if count
    )
    return f"stopped by {reason} to {recipients}"


LAG = 8
"""Largest number of steps by which a rank may be ahead of the slowest."""


class DelayedConsensus:
    """Consensus without waiting for the slowest rank in each step; used like `StepConsensus`."""

    lag = LAG

    def __init__(self, control: ControlPlane, expected_samples: Callable[[int], int]) -> None:
        """Create it; ``expected_samples`` returns the samples of a step over all ranks."""
        self._control = control
        self._expected_samples = expected_samples
        self._pending_sums: deque[tuple[Tensor, Work]] = deque()
        self._result = StepConsensusResult(0)
        self._stop = ""
        self._has_news = False
        self._skipped_steps: list[SkippedStep] = []
        self._num_announced = 0
        self.local_loss_is_nonfinite = False
        """Whether this rank's loss was not finite in the step checked last."""

    def begin(self, step: int, num_samples: int) -> None:
        """Start sending this rank's flags; receive those that were sent `LAG` steps ago."""
        self._control.on_step_begin(step)
        has_news = float(len(self._skipped_steps) > self._num_announced)
        self._num_announced = len(self._skipped_steps)
        sums = torch.tensor([*encode_stop_request(self._control), has_news], dtype=torch.float64)
        self._pending_sums.append((sums, self._control.transport.start_all_reduce(sums)))
        wait_start_s = time.monotonic()
        self._wait_until_pending(LAG)
        self._result = StepConsensusResult(
            self._expected_samples(step), self._stop, time.monotonic() - wait_start_s
        )

    def check_finite(self, loss: Tensor) -> None:
        """Record whether this rank's loss of the step is finite."""
        self.local_loss_is_nonfinite = not math.isfinite(float(loss))

    def is_finite(self) -> bool:
        """Return whether this rank's loss is finite."""
        return not self.local_loss_is_nonfinite

    def all_agree(self, local_value: bool) -> bool:
        """Return ``local_value``: each rank decides about its own gradients."""
        return local_value

    def result(self) -> StepConsensusResult:
        """Return the step's result, as known to this rank."""
        return self._result

    def record(self, record: SkippedStep) -> None:
        """Record a step that this rank skipped, until all ranks know of it."""
        self._skipped_steps.append(replace(record, rank=self._control.transport.rank))

    def take_skipped_steps(self, *, is_sync_point: bool) -> list[SkippedStep]:
        """Return the skipped steps that all ranks know of, once; the same list on every rank.

        The ranks exchange their records if one of them has announced some, or if ``is_sync_point``.
        """
        if is_sync_point or self._stop:
            self._wait_until_pending(0)  # all have begun the same sums
        elif not self._has_news:
            return []
        self._result = replace(self._result, stop_reason=self._stop)
        local_value = json.dumps([asdict(record) for record in self._skipped_steps])
        self._skipped_steps, self._num_announced, self._has_news = [], 0, False
        texts = all_gather_text(local_value, self._control.transport)
        skipped_steps = [SkippedStep(**record) for text in texts for record in json.loads(text)]
        return sorted(skipped_steps, key=lambda record: record.step)

    def _wait_until_pending(self, max_pending: int) -> None:
        """Receive sums until at most ``max_pending`` are still running."""
        while len(self._pending_sums) > max_pending:
            sums, work = self._pending_sums.popleft()
            work.wait()
            *votes, has_news = sums.tolist()
            self._stop = self._stop or describe_stop_request(votes)
            self._has_news = self._has_news or bool(has_news)


AnyConsensus = StepConsensus | DelayedConsensus
