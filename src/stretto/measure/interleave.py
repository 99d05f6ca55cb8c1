"""Timing contenders against each other in one run, so that what disturbs one disturbs all."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from stretto.comm.channel import Channel
from stretto.comm.small import add_up_


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
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for run in range(-1, runs):
        shift = run % len(names)
        for name in names[shift:] + names[:shift]:
            seconds = _time(contenders[name], repeat, channel)
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
    _largest(0.0, channel)  # nobody starts before everybody is here
    start_s = time.perf_counter()
    for _ in range(repeat):
        contender()
    return _largest((time.perf_counter() - start_s) / repeat, channel)


def _largest(mine: float, channel: Channel) -> float:
    """Return the largest of the ranks' numbers: each puts its own in its place, the rest zero."""
    places = torch.zeros(channel.size, dtype=torch.float64)
    places[channel.rank] = mine
    add_up_(places, channel)
    return float(places.max())
