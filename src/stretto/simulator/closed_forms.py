"""Latency steps of a schedule, and closed-form costs of the textbook algorithms.

`serial_steps` counts the messages on the critical path, as the papers do: a rank sends one and
receives one message at a time, and each message takes one unit of time.

`closed_form` returns an alpha-beta-gamma cost, in the notation of the papers: alpha per message,
beta per byte sent, gamma per byte added, N bytes, n ranks, and the suffix ``_l`` for links inside a
host. The formulas hold where nothing else costs anything: no core-seconds for messages, a core for
every rank, and equal chunks. A test ties them to the event engine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stretto.collectives.schedule import Schedule
from stretto.simulator.cluster import Cluster
from stretto.simulator.event_engine import run_task_by_task
from stretto.simulator.expanded_schedule import ExpandedSchedule, expand, program_symmetry
from stretto.simulator.message_costs import dependency_edges
from stretto.simulator.tasks import DependencyTracker, Ints, Tasks

_WIDE = 64
"""Average number of active ranks below which a loop is faster than columns."""


@lru_cache(maxsize=256)
def serial_steps(schedule: Schedule) -> int:
    """Return the number of messages on the longest chain of messages that wait for each other.

    A rank with several messages at once sends them in program order, each as soon as both ends are
    free. So this count compares algorithms; it is not the minimum over all orders.
    """
    expanded = expand(schedule, program_symmetry(schedule))
    if not len(expanded.messages):
        return 0
    return (
        _longest_path(expanded)
        if _is_deep(expanded) and _has_no_port_conflict(expanded)
        else _PortSimulation(expanded).run()
    )


def _is_deep(expanded: ExpandedSchedule) -> bool:
    """Whether few ranks are active at a time, so that a loop is faster than columns."""
    deepest = int(np.bincount(expanded.rounds.rank).max())
    return len(expanded.rounds) < _WIDE * deepest


def _has_no_port_conflict(expanded: ExpandedSchedule) -> bool:
    """Whether no rank ever has two messages to send, or two to receive, at the same time."""
    rounds, messages = expanded.rounds, expanded.messages
    chained = np.unique(rounds.later[rounds.earlier == rounds.later - 1])
    first = np.unique(rounds.rank, return_index=True)[1]
    is_chain = len(chained) == len(rounds) - len(first)
    ends = (messages.source, messages.target)
    return is_chain and all(np.bincount(end).max(initial=0) <= 1 for end in ends)


def _longest_path(expanded: ExpandedSchedule) -> int:
    """Return the longest path, in messages, of a schedule without port conflicts."""
    num, num_rounds = len(expanded.messages), len(expanded.rounds)
    earlier, later = dependency_edges(expanded.messages, expanded.rounds)
    delay = np.concatenate([np.ones(num), np.zeros(num_rounds)])
    no_load = np.zeros((num + num_rounds, 1))
    tasks = Tasks(
        delay, np.zeros(num + num_rounds), no_load.astype(np.int64), no_load, earlier, later, 1
    )
    return round(run_task_by_task(tasks).seconds)


class _PortSimulation:
    """Simulates messages that queue for their sender's out port and their receiver's in port."""

    def __init__(self, expanded: ExpandedSchedule) -> None:
        messages, rounds = expanded.messages, expanded.rounds
        self._num, self._num_ports = len(messages), expanded.symmetry.num_representatives
        self._out_port, self._in_port = rounds.rank[messages.source], rounds.rank[messages.target]
        self._priority = np.maximum(messages.source, messages.target)
        earlier, later = dependency_edges(messages, rounds)
        self._dependencies = DependencyTracker(earlier, later, self._num + len(rounds))

    def run(self) -> int:
        """Return the units of time until all messages have arrived."""
        now, queue = 0, self._newly_ready(self._dependencies.ready())
        while queue.size:
            now += 1
            is_sent = self._select_sendable(queue)
            ready = self._newly_ready(self._dependencies.release(queue[is_sent]))
            queue = np.concatenate([queue[~is_sent], ready])
        return now

    def _newly_ready(self, free: Ints) -> Ints:
        """Return the messages that are ready now, in queue order; ends of rounds take no time."""
        found = [free[:0]]
        while free.size:
            found.append(free[free < self._num])
            free = self._dependencies.release(free[free >= self._num])
        new = np.concatenate(found)
        return new[np.lexsort((new, self._priority[new]))]

    def _select_sendable(self, queue: Ints) -> NDArray[np.bool_]:
        """Return which of ``queue`` are sent: in queue order, those with both ports still free."""
        out, into = self._out_port[queue], self._in_port[queue]
        is_sent, left = np.zeros(len(queue), dtype=np.bool_), np.arange(len(queue))
        while left.size:
            firsts = (_is_first_of_port(port[left], self._num_ports) for port in (out, into))
            now = left[np.logical_and(*firsts)]
            is_sent[now] = True
            left = left[~_is_in(out[left], out[now], self._num_ports)]
            left = left[~_is_in(into[left], into[now], self._num_ports)]
        return is_sent


def _is_first_of_port(port: Ints, num_ports: int) -> NDArray[np.bool_]:
    """Return which entries are the first ones of their port."""
    first = np.full(num_ports, len(port))
    first[port[::-1]] = np.arange(len(port))[::-1]
    result: NDArray[np.bool_] = first[port] == np.arange(len(port))
    return result


def _is_in(port: Ints, taken: Ints, num_ports: int) -> NDArray[np.bool_]:
    """Return which entries of ``port`` are in ``taken``."""
    is_taken = np.zeros(num_ports, dtype=np.bool_)
    is_taken[taken] = True
    return is_taken[port]


# --- closed forms ---


@dataclass(frozen=True, slots=True)
class AlphaBetaModel:
    """A cluster and a tensor in the notation of the papers, see the module docstring."""

    n: int
    k: int
    """Ranks of each host."""
    N: float
    alpha: float
    beta: float
    gamma: float
    alpha_l: float
    beta_l: float

    @property
    def fold_s(self) -> float:
        """Cost of folding extra ranks into a power of two: two messages, one of them added."""
        is_power_of_two = self.n == 1 << (self.n.bit_length() - 1)
        return (
            0.0 if is_power_of_two else 2 * (self.alpha + self.N * self.beta) + self.N * self.gamma
        )


def closed_form(name: str, num_bytes: int, cluster: Cluster) -> float | None:
    """Return the seconds that the formula of algorithm ``name`` gives; None if it has none.

    Flat algorithms have a formula where every host has one rank. Hierarchical algorithms have one
    where all hosts have the same number of ranks.
    """
    each = set(cluster.ranks_per_host)
    formula = FORMULAS.get(name)
    if formula is None or len(each) > 1 or (name not in _HIERARCHICAL and each != {1}):
        return None
    out, inside = cluster.between, cluster.inside
    return formula(
        AlphaBetaModel(
            n=cluster.mesh.size,
            k=each.pop(),
            N=num_bytes,
            alpha=out.latency_s,
            beta=1 / out.bytes_per_s,
            gamma=cluster.cpu.s_per_byte_added,
            alpha_l=inside.latency_s,
            beta_l=1 / inside.bytes_per_s,
        )
    )


def _gather_broadcast(c: AlphaBetaModel) -> float:
    return 2 * (c.n - 1) * (c.alpha + c.N * c.beta) + (c.n - 1) * c.N * c.gamma


def _binomial(c: AlphaBetaModel) -> float:
    return (c.n - 1).bit_length() * (2 * (c.alpha + c.N * c.beta) + c.N * c.gamma)


def _doubling(c: AlphaBetaModel) -> float:
    exchanges = c.n.bit_length() - 1
    return exchanges * (c.alpha + c.N * c.beta + c.N * c.gamma) + c.fold_s


def _halving_doubling(c: AlphaBetaModel) -> float:
    steps = c.n.bit_length() - 1
    share = 1 - 1 / (1 << steps)
    return 2 * steps * c.alpha + share * c.N * (2 * c.beta + c.gamma) + c.fold_s


def _ring(c: AlphaBetaModel) -> float:
    return 2 * (c.n - 1) * c.alpha + (c.n - 1) / c.n * c.N * (2 * c.beta + c.gamma)


def _torus(c: AlphaBetaModel) -> float:
    row = max(x for x in range(1, c.n + 1) if c.n % x == 0 and x * x <= c.n)
    steps = 2 * (row + c.n // row - 2)
    return steps * c.alpha + (c.n - 1) / c.n * c.N * (2 * c.beta + c.gamma)


def _inside(c: AlphaBetaModel) -> float:
    """Reduce-scatter and all-gather inside hosts."""
    return 2 * (c.k - 1) * c.alpha_l + (c.k - 1) / c.k * c.N * (2 * c.beta_l + c.gamma)


def _hierarchical(c: AlphaBetaModel) -> float:
    m = c.n // c.k
    between = 2 * (m - 1) * c.alpha + (m - 1) / m * c.N * (2 * c.beta + c.gamma / c.k)
    return _inside(c) + between


def _hierarchical_doubling(c: AlphaBetaModel) -> float:
    m = c.n // c.k
    steps = m.bit_length() - 1
    each = c.alpha + c.N * c.beta + c.N / c.k * c.gamma
    extra = 0.0 if m == 1 << steps else 2 * (c.alpha + c.N * c.beta) + c.N / c.k * c.gamma
    return _inside(c) + steps * each + extra


def _masters(c: AlphaBetaModel) -> float:
    """Between hosts one master each; its ranks send and receive their parts one at a time."""
    m = c.n // c.k
    between = 2 * (m - 1) * c.alpha + (m - 1) / m * c.N * (2 * c.beta + c.gamma)
    to_and_from_s = 2 * (c.k - 1) * (c.alpha_l + c.N / c.k * c.beta_l)
    return _inside(c) + to_and_from_s + between


FORMULAS: Mapping[str, Callable[[AlphaBetaModel], float]] = {
    "gather-broadcast": _gather_broadcast,
    "binomial": _binomial,
    "doubling": _doubling,
    "halving-doubling": _halving_doubling,
    "ring": _ring,
    "torus": _torus,
    "masters": _masters,
    "hierarchical": _hierarchical,
    "hierarchical-doubling": _hierarchical_doubling,
}
_HIERARCHICAL = {"masters", "hierarchical", "hierarchical-doubling"}
