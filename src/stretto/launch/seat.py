"""A rank's seat among the others: channels, beats, and whom to blame when something breaks."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TextIO

from torch._C._distributed_c10d import Store

from stretto.cluster.beats import Pulse, Verdict, leave_verdict, read_verdict
from stretto.cluster.meet import meet
from stretto.cluster.store import connect_store
from stretto.cluster.world import World
from stretto.comm.channel import Channel
from stretto.comm.connect import connect
from stretto.comm.small import meet_all
from stretto.errors import ChannelError, StrettoError
from stretto.launch.screen import echo_of
from stretto.launch.stop import StopRequest
from stretto.run import RunSection
from stretto.train.agreement import Control

_VERDICT_S = 2.0
"""How long a rank that lost a peer waits for the word of whoever broke first."""


@dataclass(frozen=True, slots=True)
class Seat:
    """What a rank has once it has met the others: its world, its channels, its sign of life."""

    world: World
    channel: Channel
    control: Channel
    """For small agreements, apart from the strategy's messages."""
    stream: TextIO
    """Where this rank speaks."""
    pulse: Pulse | None = None
    """None when alone."""

    def say(self, line: str) -> None:
        """Say a line, at once: what is held back is lost when this process is ended."""
        self.stream.write(f"{line}\n")
        self.stream.flush()


def take_seat(stack: ExitStack, run: RunSection, world: World, stream: TextIO) -> Seat:
    """Meet the others and begin to beat."""
    channel = connect(world, run.timeout_s)
    stack.callback(channel.close)
    if world.meeting is None:
        return Seat(world, channel, channel, stream)
    control = connect(world, run.timeout_s, name="control")
    stack.callback(control.close)
    met = meet(world)
    assert met.world.meeting is not None
    beside = connect_store(met.world.meeting, world.rank, run.timeout_s)
    seat = Seat(met.world, channel, control, stream)
    pulse = Pulse(beside, met.world, run.silence_s, seat.say)
    meet_all(control)
    pulse.start()
    stack.callback(pulse.stop)
    return replace(seat, pulse=pulse)


def control_of(seat: Seat, request: StopRequest) -> Control:
    """Return what ranks agree over: who asks for a stop, and beats that tell which step it is."""

    def tell_step(step: int) -> None:
        if seat.pulse:
            seat.pulse.step = step

    return Control(seat.control, request.word, tell_step)


def leave(seat: Seat) -> None:
    """Wait until every rank has come this far, beating; nobody watches what comes after."""
    meet_all(seat.control)
    if seat.pulse:
        seat.pulse.stop()


@contextmanager
def blaming(seat: Seat) -> Iterator[None]:
    """Tell the store who failed first, and a victim who it was."""
    try:
        yield
    except Exception as failure:
        if (blamed := _blame(failure, seat)) is not failure:
            raise blamed from failure
        raise


def _blame(failure: Exception, seat: Seat) -> Exception:
    """Return what to raise: a rank that lost a peer asks for the word of whoever broke first."""
    if seat.pulse is None:
        return failure
    store, generation, rank = meet(seat.world).store, seat.world.generation, seat.world.rank
    try:
        if not isinstance(failure, ChannelError):
            kind = "" if isinstance(failure, StrettoError) else f"{type(failure).__name__}: "
            leave_verdict(store, generation, Verdict(rank, f"{kind}{failure}", "failed"))
            return failure
        verdict = _await_verdict(store, generation)
    except RuntimeError:  # the store is gone with the launcher: no one to tell, no one to ask
        return failure
    if verdict is None or verdict.rank == rank:
        return failure
    return ChannelError(echo_of(verdict.rank, verdict.reason))


def _await_verdict(store: Store, generation: int) -> Verdict | None:
    deadline_s = time.monotonic() + _VERDICT_S
    while (verdict := read_verdict(store, generation)) is None and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return verdict
