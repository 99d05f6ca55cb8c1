"""From single problems of single ranks to the one line of a check."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stretto.doctor.records import Examination, Facts, Finding, Status
from stretto.telemetry.wording import ranks_in_words

SHOWN = 3
"""Problems told in one line; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one rank, and what to do about it."""

    rank: int
    text: str
    advice: str
    status: Status = "FAIL"


def finding(check: str, seen: Examination, problems: Sequence[Problem], fine: str) -> Finding:
    """Return the line of a check: ``fine`` when nothing is wrong, otherwise the problems.

    The same problem of several ranks is told once; what fails goes before what only warns.
    """
    if not problems:
        return Finding(check, "ok", (), fine)
    groups: dict[tuple[bool, str, str], list[int]] = {}
    for problem in problems:
        key = (problem.status != "FAIL", problem.text, problem.advice)
        groups.setdefault(key, []).append(problem.rank)
    # Sorting is stable: within a status the order of discovery stays.
    ordered = sorted(groups, key=lambda key: key[0])
    told = [f"{_who(seen, groups[key])}: {key[1]}" for key in ordered[:SHOWN]]
    more = [f"and {len(ordered) - SHOWN} more"] if len(ordered) > SHOWN else []
    return Finding(
        check=check,
        status="warn" if ordered[0][0] else "FAIL",
        ranks=tuple(sorted({rank for ranks in groups.values() for rank in ranks})),
        finding="; ".join([*told, *more]),
        advice="; ".join(dict.fromkeys(advice for _, _, advice in ordered[:SHOWN] if advice)),
    )


def per_rank(seen: Examination, look: Callable[[Facts], Problem | None]) -> list[Problem]:
    """Return the problems that ``look`` finds in each rank's own facts."""
    return [problem for facts in seen.facts.values() if (problem := look(facts)) is not None]


def each(values: Iterable[str]) -> str:
    """Return the different values among ``values``, in order."""
    return ", ".join(dict.fromkeys(values))


def _who(seen: Examination, ranks: Sequence[int]) -> str:
    """Return ``rank 2 (host n2, 198.18.0.3)``, as far as it is known and one thing."""
    known = [seen.facts[rank] for rank in ranks if rank in seen.facts]
    hosts = {facts.place.host for facts in known}
    addresses = {facts.network.address for facts in known} if seen.size > 1 else set()
    where = [f"host {host}" for host in hosts if len(hosts) == 1]
    where += [address for address in addresses if len(addresses) == 1 and address]
    return f"{ranks_in_words(ranks)} ({', '.join(where)})" if where else ranks_in_words(ranks)
