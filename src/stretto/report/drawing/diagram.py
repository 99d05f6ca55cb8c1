"""What there is to draw of a schedule, in whatever form: messages, hosts, names, an excerpt."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from stretto.cluster.world import Mesh
from stretto.comm.schedule import Action, Schedule
from stretto.report.drawing.messages import Message, messages
from stretto.telemetry.wording import counted, printable

MOST_MESSAGES = 50_000
"""Listing them takes a second or two; nobody reads more."""
SIGNS = {Action.ADD: "+", Action.COPY: "="}
_LONGEST_NAME = 60


@dataclass(frozen=True, slots=True)
class Diagram:
    """A schedule, ready to be drawn."""

    title: str
    note: str
    """What the reader must know before believing it; often nothing."""
    mesh: Mesh
    num_chunks: int
    messages: tuple[Message, ...]
    lanes: Mapping[int, str]
    """What to call each lane that is used."""

    def kind(self, message: Message) -> int:
        """Return what decides a message's colour: its lane or, where there is one, its action."""
        if len(self.lanes) > 1:
            return list(self.lanes).index(message.lane)
        return list(SIGNS).index(message.action)


def diagram(schedule: Schedule, mesh: Mesh, collective: str) -> Diagram:
    """Return what to draw of ``schedule``, which carries out ``collective`` on ``mesh``."""
    name = printable(schedule.name)
    if len(name) > _LONGEST_NAME:
        name = name[: _LONGEST_NAME - 3] + "..."
    if schedule.name.partition("/")[0] != collective:  # some are called what they carry out
        name += f" {printable(collective)}"
    where = counted(mesh.size, "rank")
    if mesh.hosts > 1:
        where += f" on {counted(mesh.hosts, 'host')}"
    note = ""
    if schedule.native:
        note = "the back end does this in one call of its own; drawn is what it is taken to do"
    listed = messages(schedule, MOST_MESSAGES)
    return Diagram(
        f"{name} for {where}, the tensor in {counted(schedule.num_chunks, 'chunk')}",
        note,
        mesh,
        schedule.num_chunks,
        listed,
        _lanes(listed, mesh),
    )


def steps(shown: Diagram) -> list[list[Message]]:
    """Return the messages of each step."""
    return [list(step) for _, step in groupby(shown.messages, key=lambda m: m.step)]


def host_of_each(mesh: Mesh) -> list[int]:
    """Return the host of every rank; asking the mesh one by one is slow where hosts are many."""
    return [host for host, ranks in enumerate(mesh.ranks_per_host) for _ in range(ranks)]


def label(message: Message) -> str:
    """Return ``+3`` where chunk 3 is added, ``=0-3`` where chunks 0 to 3 are copied."""
    last = message.stop - 1
    chunks = f"{message.start}" if message.start == last else f"{message.start}-{last}"
    return f"{SIGNS[message.action]}{chunks}"


def sentence(message: Message) -> str:
    """Return what a message does, in words."""
    last = message.stop - 1
    chunks = f"chunk {last}" if message.start == last else f"chunks {message.start} to {last}"
    what = "adds" if message.action is Action.ADD else "copies"
    them = "it" if message.start == last else "them"
    return (
        f"step {message.step}, lane {message.lane}: rank {message.source} sends {chunks} to "
        f"rank {message.target}, which {what} {them}"
    )


def signs(shown: Diagram) -> list[tuple[Action, str]]:
    """Return the actions that occur, each with what its sign means."""
    words = {
        Action.ADD: "chunk N is added to what the receiver holds",
        Action.COPY: "chunk N replaces what the receiver holds",
    }
    used = {message.action for message in shown.messages}
    return [(action, f"{SIGNS[action]}N: {words[action]}") for action in SIGNS if action in used]


def excerpt(weights: Sequence[int], most: int) -> tuple[int, int]:
    """Return how many of the first and of the last steps to show so that ``most`` is kept to.

    All are among the first where they fit; else two thirds of the room are for the beginning. The
    first and the last step are always shown.
    """
    if sum(weights) <= most or len(weights) < 3:
        return len(weights), 0
    first, last = 1, 1
    while sum(weights[: first + 1]) <= most * 2 / 3:
        first += 1
    while sum(weights[-last - 1 :]) <= most / 3:
        last += 1
    return first, last  # they cannot meet: the whole weighs more than both shares


def _lanes(listed: Sequence[Message], mesh: Mesh) -> dict[int, str]:
    """Name each lane by what travels on it: a schedule itself only numbers them."""
    host = host_of_each(mesh)
    crossing: dict[int, set[bool]] = defaultdict(set)
    actions: dict[int, set[Action]] = defaultdict(set)
    for message in listed:
        crossing[message.lane].add(host[message.source] != host[message.target])
        actions[message.lane].add(message.action)
    names: dict[int, str] = {}
    for lane in sorted(actions):
        words = [f"lane {lane}"]
        if mesh.hosts > 1 and len(crossing[lane]) == 1:
            words.append("between hosts" if True in crossing[lane] else "inside hosts")
        if len(actions[lane]) == 1:
            words.append("adding" if Action.ADD in actions[lane] else "copying")
        names[lane] = ", ".join(words)
    return names
