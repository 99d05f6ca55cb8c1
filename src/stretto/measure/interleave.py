"""Timing contenders against each other in one run, so that what disturbs one disturbs all."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from stretto.comm.channel import Channel
from stretto.comm.small import add_up_

STEPS = 2
"""Steps that are timed as one, where nobody says otherwise."""


class Contender(Protocol):
    """Whatever takes a training step when it is called."""

    def __call__(self) -> None:
        """Take a step; some of its messages may still be under way afterwards."""
        ...

    def rest(self) -> None:
        """Wait for them; all ranks together."""
        ...

    def close(self) -> None:
        """End threads."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a benchmark: ours beside the peer and the bound, in seconds."""

    case: str
    ours_s: float
    peer: str
    peer_s: float
    bound_s: float | None
    """What no method could beat; None where the links are not known."""
    runs: int
    spread: float
    """Middle half of our runs, as a share of their median."""
    ours_bytes: int | None = None
    """The most bytes of tensors that live at once in a step; None where nobody counts them."""
    peer_bytes: int | None = None

    @property
    def ratio(self) -> float:
        """Ours over the peer's: below one is faster."""
        return self.ours_s / self.peer_s


def interleave(
    contenders: Mapping[str, Callable[[], None]],
    channel: Channel,
    *,
    runs: int,
    repeat: int = 2,
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, list[float]]:
    """Return seconds per call of each contender, ``runs`` times; all ranks call this together.

    One round times every contender once (``repeat`` calls), starting with another one each time;
    a rank's clock counts from a common start, and the slowest rank's time counts. One round
    before the first is not counted.
    """
    timed = {name: partial(_time, one, repeat, channel) for name, one in contenders.items()}
    return _in_turn(timed, runs, say)


def interleave_steps(
    contenders: Mapping[str, Contender],
    channel: Channel,
    *,
    runs: int,
    steps: int = STEPS,
    device: str = "cpu",
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, list[float]]:
    """Return seconds per training step of each contender, in the same way.

    ``steps`` are timed as one: those of a whole period, where steps differ. A step may leave
    messages to the next one, so the clock runs between the ends of two steps: what the first of
    them left under way is paid for, what the last one leaves is not.
    """
    make_clock = _GPUClock if device == "cuda" else _Clock
    timed = {
        name: partial(_time_steps, one, make_clock(), channel, steps)
        for name, one in contenders.items()
    }
    return _in_turn(timed, runs, say)


def _in_turn(
    timed: Mapping[str, Callable[[], float]], runs: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    names = list(timed)
    times: dict[str, list[float]] = {name: [] for name in names}
    for run in range(-1, runs):
        shift = run % len(names)
        for name in names[shift:] + names[:shift]:
            seconds = timed[name]()
            if run >= 0:
                times[name].append(seconds)
        say(f"round {run + 1} of {runs} done")
    return times


def spread(values: list[float]) -> float:
    """Return the distance between the quartiles as a share of the median."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / statistics.median(values)


def _time(contender: Callable[[], None], repeat: int, channel: Channel) -> float:
    largest(0.0, channel)  # nobody starts before everybody is here
    start_s = time.perf_counter()
    for _ in range(repeat):
        contender()
    return largest((time.perf_counter() - start_s) / repeat, channel)


class _Clock:
    """Seconds between two moments of this thread."""

    def start(self) -> None:
        self._start_s = time.perf_counter()

    def stop(self) -> float:
        return time.perf_counter() - self._start_s


class _GPUClock:
    """Seconds between two moments of the stream that computes; nothing is waited for in between."""

    def start(self) -> None:
        self._start = _record()

    def stop(self) -> float:
        end = _record()
        end.synchronize()
        return float(self._start.elapsed_time(end)) / 1e3


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _time_steps(
    contender: Contender, clock: _Clock | _GPUClock, channel: Channel, steps: int
) -> float:
    largest(0.0, channel)
    contender()
    clock.start()
    for _ in range(steps):
        contender()
    seconds = clock.stop() / steps
    contender.rest()  # nothing of it travels while others are timed
    return largest(seconds, channel)


def largest(mine: float, channel: Channel) -> float:
    """Return the largest of the ranks' numbers: each puts its own in its place, the rest zero."""
    places = torch.zeros(channel.size, dtype=torch.float64)
    places[channel.rank] = mine
    add_up_(places, channel)
    return float(places.max())
