"""What a schedule comes to: messages and shares of the tensor, per rank and per host's link."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.report.drawing.diagram import Diagram, host_of_each
from stretto.telemetry.wording import counted, ranks_in_words

_MOST_KINDS = 6


@dataclass(frozen=True, slots=True)
class Load:
    """What leaves somewhere and what arrives there."""

    sent: int = 0
    sent_chunks: int = 0
    received: int = 0
    received_chunks: int = 0


def rank_loads(shown: Diagram) -> list[Load]:
    """Return what each rank sends and receives."""
    return _loads(shown, list(range(shown.mesh.size)), shown.mesh.size)


def link_loads(shown: Diagram) -> list[Load]:
    """Return what each host sends to and receives from other hosts."""
    return _loads(shown, host_of_each(shown.mesh), shown.mesh.hosts)


def totals(shown: Diagram) -> list[str]:
    """Return what it comes to, in sentences."""
    if not shown.messages:
        return ["nothing is sent: one rank has everything already"]
    said = [
        f"{counted(shown.messages[-1].step, 'step')} one after another, "
        f"{counted(len(shown.messages), 'message')} in all"
    ]
    said += _told(
        rank_loads(shown),
        lambda load: _rank_words(load, shown.num_chunks),
        ("each rank", ranks_in_words, "ranks"),
    )
    if shown.mesh.hosts > 1:
        said += _told(
            link_loads(shown),
            lambda load: _link_words(load, shown.num_chunks),
            ("each host's link", _hosts_in_words, "hosts' links"),
        )
    return said


def share(chunks: int, num_chunks: int) -> str:
    """Return chunks as multiples of the tensor: ``1.5 x the tensor``."""
    return f"{chunks / num_chunks:.4g} x the tensor"


def _loads(shown: Diagram, place: Sequence[int], count: int) -> list[Load]:
    """Add up what passes from one place to another; ``place`` is where each rank is."""
    sums = [[0, 0, 0, 0] for _ in range(count)]
    for message in shown.messages:
        source, target = place[message.source], place[message.target]
        if source != target:
            sums[source][0] += 1
            sums[source][1] += message.num_chunks
            sums[target][2] += 1
            sums[target][3] += message.num_chunks
    return [Load(*each) for each in sums]


def _told(
    loads: Sequence[Load],
    words: Callable[[Load], str],
    names: tuple[str, Callable[[Sequence[int]], str], str],
) -> list[str]:
    """Say each load once, with those that have it; where they are too many, their range."""
    each, some, plural = names
    alike: dict[str, list[int]] = defaultdict(list)
    for index, load in enumerate(loads):
        alike[words(load)].append(index)
    if len(alike) == 1:
        return [f"{each}: {next(iter(alike))}"]
    if len(alike) <= _MOST_KINDS:
        return [f"{some(members)}: {text}" for text, members in alike.items()]
    least, largest = (f(loads, key=lambda load: load.sent_chunks) for f in (min, max))
    return [f"{plural} differ, from: {words(least)}", f"to: {words(largest)}"]


def _rank_words(load: Load, num_chunks: int) -> str:
    sent = _amount(load.sent, load.sent_chunks, num_chunks)
    if (load.sent, load.sent_chunks) == (load.received, load.received_chunks):
        return f"{sent} out, as much in"
    return f"{sent} out, {_amount(load.received, load.received_chunks, num_chunks)} in"


def _amount(number: int, chunks: int, num_chunks: int) -> str:
    return f"{counted(number, 'message')} ({share(chunks, num_chunks)})" if number else "nothing"


def _link_words(load: Load, num_chunks: int) -> str:
    if load.sent_chunks == load.received_chunks:
        return f"{share(load.sent_chunks, num_chunks)} each way"
    return (
        f"{share(load.sent_chunks, num_chunks)} out, {share(load.received_chunks, num_chunks)} in"
    )


def _hosts_in_words(hosts: Sequence[int]) -> str:
    return ranks_in_words(hosts).replace("rank", "link of host", 1)
