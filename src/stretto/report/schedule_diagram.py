"""The content of a schedule's drawing, for any output: messages, labels, totals, an excerpt."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from stretto.cluster.world import Mesh
from stretto.collectives.schedule import Action, Schedule
from stretto.report.schedule_messages import ScheduleMessage, messages
from stretto.telemetry.event_text import count_text, ranks_text, strip_unprintable

MOST_MESSAGES = 50_000
"""Most messages to list; this many take a second or two."""
ACTION_SIGNS = {Action.ADD: "+", Action.COPY: "="}
_LONGEST_NAME = 60


@dataclass(frozen=True, slots=True)
class Diagram:
    """A schedule, ready to be drawn."""

    title: str
    note: str
    """A caveat for the reader; often empty."""
    mesh: Mesh
    num_chunks: int
    messages: tuple[ScheduleMessage, ...]
    lanes: Mapping[int, str]
    """The displayed name of each used lane."""

    def colour_index(self, message: ScheduleMessage) -> int:
        """Return the colour number of a message: by lane, or by action if only one lane is used."""
        if len(self.lanes) > 1:
            return list(self.lanes).index(message.lane)
        return list(ACTION_SIGNS).index(message.action)


def make_diagram(schedule: Schedule, mesh: Mesh, collective: str) -> Diagram:
    """Return the diagram of ``schedule``, which implements ``collective`` on ``mesh``."""
    name = strip_unprintable(schedule.name)
    if len(name) > _LONGEST_NAME:
        name = name[: _LONGEST_NAME - 3] + "..."
    if schedule.name.partition("/")[0] != collective:  # some schedules are named like it
        name += f" {strip_unprintable(collective)}"
    where = count_text(mesh.size, "rank")
    if mesh.hosts > 1:
        where += f" on {count_text(mesh.hosts, 'host')}"
    note = ""
    if schedule.native:
        note = (
            "the backend does this in one native call; the drawing shows what it is assumed to do"
        )
    listed = messages(schedule, MOST_MESSAGES)
    return Diagram(
        f"{name} for {where}, the tensor in {count_text(schedule.num_chunks, 'chunk')}",
        note,
        mesh,
        schedule.num_chunks,
        listed,
        _lanes(listed, mesh),
    )


def messages_by_step(chart: Diagram) -> list[list[ScheduleMessage]]:
    """Return the messages of each step."""
    return [list(step) for _, step in groupby(chart.messages, key=lambda m: m.step)]


def hosts_by_rank(mesh: Mesh) -> list[int]:
    """Return the host of every rank, faster than asking the mesh for each."""
    return [host for host, ranks in enumerate(mesh.ranks_per_host) for _ in range(ranks)]


def message_label(message: ScheduleMessage) -> str:
    """Return ``+3`` if chunk 3 is added, ``=0-3`` if chunks 0 to 3 are copied."""
    last = message.stop - 1
    chunks = f"{message.start}" if message.start == last else f"{message.start}-{last}"
    return f"{ACTION_SIGNS[message.action]}{chunks}"


def describe_message(message: ScheduleMessage) -> str:
    """Return a sentence that describes a message."""
    last = message.stop - 1
    chunks = f"chunk {last}" if message.start == last else f"chunks {message.start} to {last}"
    verb = "adds" if message.action is Action.ADD else "copies"
    pronoun = "it" if message.start == last else "them"
    return (
        f"step {message.step}, lane {message.lane}: rank {message.source} sends {chunks} to "
        f"rank {message.target}, which {verb} {pronoun}"
    )


def sign_legend(chart: Diagram) -> list[tuple[Action, str]]:
    """Return the actions that occur, each with the meaning of its sign."""
    meanings = {
        Action.ADD: "chunk N is added to what the receiver holds",
        Action.COPY: "chunk N replaces what the receiver holds",
    }
    used = {message.action for message in chart.messages}
    return [
        (action, f"{ACTION_SIGNS[action]}N: {meanings[action]}")
        for action in ACTION_SIGNS
        if action in used
    ]


def excerpt_lengths(weights: Sequence[int], most: int) -> tuple[int, int]:
    """Return how many steps to show from the start and from the end.

    If the weights of all steps fit into ``most``, the answer is (all, 0). Otherwise the start gets
    two thirds of ``most``. The first and the last step are always shown.
    """
    if sum(weights) <= most or len(weights) < 3:
        return len(weights), 0
    first, last = 1, 1
    while sum(weights[: first + 1]) <= most * 2 / 3:
        first += 1
    while sum(weights[-last - 1 :]) <= most / 3:
        last += 1
    return first, last  # they cannot overlap: together they weigh less than the whole


def _lanes(listed: Sequence[ScheduleMessage], mesh: Mesh) -> dict[int, str]:
    """Return a name for each lane that says what is sent on it; a schedule only numbers lanes."""
    host = hosts_by_rank(mesh)
    crossing: dict[int, set[bool]] = defaultdict(set)
    actions: dict[int, set[Action]] = defaultdict(set)
    for message in listed:
        crossing[message.lane].add(host[message.source] != host[message.target])
        actions[message.lane].add(message.action)
    names: dict[int, str] = {}
    for lane in sorted(actions):
        parts = [f"lane {lane}"]
        if mesh.hosts > 1 and len(crossing[lane]) == 1:
            parts.append("between hosts" if True in crossing[lane] else "inside hosts")
        if len(actions[lane]) == 1:
            parts.append("adding" if Action.ADD in actions[lane] else "copying")
        names[lane] = ", ".join(parts)
    return names


# --- traffic of each rank and of each host's link ---

_MOST_KINDS = 6
"""Most different loads to list; with more, only the smallest and the largest are shown."""


@dataclass(frozen=True, slots=True)
class TrafficLoad:
    """The messages and chunks that a rank or host sends and receives."""

    sent: int = 0
    sent_chunks: int = 0
    received: int = 0
    received_chunks: int = 0


def rank_traffic(chart: Diagram) -> list[TrafficLoad]:
    """Return the traffic of each rank."""
    return _loads(chart, list(range(chart.mesh.size)), chart.mesh.size)


def link_traffic(chart: Diagram) -> list[TrafficLoad]:
    """Return the traffic of each host with other hosts."""
    return _loads(chart, hosts_by_rank(chart.mesh), chart.mesh.hosts)


def totals(chart: Diagram) -> list[str]:
    """Return sentences on the numbers of steps and messages, and on the traffic."""
    if not chart.messages:
        return ["nothing is sent: there is only one rank"]
    sentences = [
        f"{count_text(chart.messages[-1].step, 'step')} one after another, "
        f"{count_text(len(chart.messages), 'message')} in all"
    ]
    sentences += _describe_loads(
        rank_traffic(chart),
        lambda load: _rank_text(load, chart.num_chunks),
        ("each rank", ranks_text, "ranks"),
    )
    if chart.mesh.hosts > 1:
        sentences += _describe_loads(
            link_traffic(chart),
            lambda load: _link_text(load, chart.num_chunks),
            ("each host's link", _hosts_text, "hosts' links"),
        )
    return sentences


def tensor_share(chunks: int, num_chunks: int) -> str:
    """Return a number of chunks as a multiple of the tensor, such as ``1.5 x the tensor``."""
    return f"{chunks / num_chunks:.4g} x the tensor"


def _loads(chart: Diagram, group_of_rank: Sequence[int], count: int) -> list[TrafficLoad]:
    """Return the traffic between groups of ranks; ``group_of_rank`` is the group of each rank."""
    sums = [[0, 0, 0, 0] for _ in range(count)]
    for message in chart.messages:
        source, target = group_of_rank[message.source], group_of_rank[message.target]
        if source != target:
            sums[source][0] += 1
            sums[source][1] += message.num_chunks
            sums[target][2] += 1
            sums[target][3] += message.num_chunks
    return [TrafficLoad(*each) for each in sums]


def _describe_loads(
    loads: Sequence[TrafficLoad],
    describe: Callable[[TrafficLoad], str],
    names: tuple[str, Callable[[Sequence[int]], str], str],
) -> list[str]:
    """Return a line for each different load with its members; only the range if there are many."""
    each, some, plural = names
    indices_by_text: dict[str, list[int]] = defaultdict(list)
    for index, load in enumerate(loads):
        indices_by_text[describe(load)].append(index)
    if len(indices_by_text) == 1:
        return [f"{each}: {next(iter(indices_by_text))}"]
    if len(indices_by_text) <= _MOST_KINDS:
        return [f"{some(members)}: {text}" for text, members in indices_by_text.items()]
    least, largest = (f(loads, key=lambda load: load.sent_chunks) for f in (min, max))
    return [f"{plural} differ, from: {describe(least)}", f"to: {describe(largest)}"]


def _rank_text(load: TrafficLoad, num_chunks: int) -> str:
    sent = _amount(load.sent, load.sent_chunks, num_chunks)
    if (load.sent, load.sent_chunks) == (load.received, load.received_chunks):
        return f"{sent} out, as much in"
    return f"{sent} out, {_amount(load.received, load.received_chunks, num_chunks)} in"


def _amount(number: int, chunks: int, num_chunks: int) -> str:
    return (
        f"{count_text(number, 'message')} ({tensor_share(chunks, num_chunks)})"
        if number
        else "nothing"
    )


def _link_text(load: TrafficLoad, num_chunks: int) -> str:
    if load.sent_chunks == load.received_chunks:
        return f"{tensor_share(load.sent_chunks, num_chunks)} each way"
    sent, received = (
        tensor_share(chunks, num_chunks) for chunks in (load.sent_chunks, load.received_chunks)
    )
    return f"{sent} out, {received} in"


def _hosts_text(hosts: Sequence[int]) -> str:
    return ranks_text(hosts).replace("rank", "link of host", 1)
