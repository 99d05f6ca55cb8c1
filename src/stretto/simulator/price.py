"""Predict the cost of a collective on a cluster, simulated as `CollectiveExecutor` runs it.

On every rank and lane, rounds run one after another. A round starts when its predecessors are done.
All its messages are in flight at once; each starts when both its ends are ready. Then the received
data is added, and the round is done. Messages share links, cores and their ranks' threads fairly
(`stretto.simulator.event_engine`).

Long runs of equal rounds are shortened: a ring of 10,000 ranks repeats one round 9,999 times. After
some of them every round takes the same time, which is then used for the rounds left out. The price
checks on the simulated rounds that this steady state was reached. A test compares shortened and
complete simulations.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stretto.collectives.schedule import Schedule
from stretto.errors import ConfigError
from stretto.simulator.cluster import Cluster
from stretto.simulator.event_engine import run
from stretto.simulator.expanded_schedule import (
    ExpandedMessages,
    ExpandedRounds,
    ExpandedSchedule,
    Symmetry,
    expand,
    host_symmetry,
)
from stretto.simulator.message_costs import (
    CORES,
    ELEMENT_BYTES,
    INSIDE,
    LATENCY,
    LINK,
    THREAD,
    ResourceCosts,
    cost_resources,
)
from stretto.simulator.tasks import Floats, Ints, Tasks, TaskTimes
from stretto.telemetry.timeline import Span, Timeline

# --- where the time goes ---

Labels = NDArray[np.str_]


def critical_path(tasks: Tasks, times: TaskTimes) -> Ints:
    """Return the tasks of the critical path in order: each starts when the one before it ends."""
    if not len(tasks):
        return np.empty(0, dtype=np.int64)
    is_last = times.end_s[tasks.earlier] == times.start_s[tasks.later]
    predecessor = np.full(len(tasks), -1)
    predecessor[tasks.later[is_last]] = tasks.earlier[is_last]
    path, previous = [int(times.end_s.argmax())], predecessor.tolist()
    while previous[path[-1]] >= 0:
        path.append(previous[path[-1]])
    return np.array(path[::-1], dtype=np.int64)


def time_breakdown(costs: ResourceCosts, times: TaskTimes) -> dict[str, float]:
    """Return the seconds of the critical path by kind of bottleneck.

    The isolated work of a task counts for the resource that limits it in isolation. The time that
    it loses to other tasks counts for the busiest resource that it uses.
    """
    tasks = costs.tasks
    path = critical_path(tasks, times)
    result = dict.fromkeys((LATENCY, LINK, INSIDE, CORES, THREAD), 0.0)
    result[LATENCY] = float(tasks.delay_s[path].sum())
    lost_s = times.end_s[path] - times.start_s[path] - tasks.delay_s[path] - tasks.work_s[path]
    limited_by = _limiting_resource(costs, path)
    busiest_kind = _busiest_resource(costs, path)
    for kind in (LINK, INSIDE, CORES, THREAD):
        took_s = tasks.work_s[path][limited_by == kind].sum() + lost_s[busiest_kind == kind].sum()
        result[kind] = max(0.0, float(took_s))
    return result


def _limiting_resource(costs: ResourceCosts, path: Ints) -> Labels:
    """Return what limits each task of ``path`` in isolation: its link, its thread, or cores."""
    message = costs.message_of(path)
    sent = message >= 0
    limit = np.full(len(path), CORES, dtype=object)
    limit[sent] = np.where(costs.between[message[sent]], LINK, INSIDE)
    limit[sent & (costs.tasks.load[path, -1] >= 1)] = THREAD
    return limit.astype(np.str_)


def _busiest_resource(costs: ResourceCosts, path: Ints) -> Labels:
    """Return the kind of the busiest resource that each task of ``path`` uses."""
    tasks = costs.tasks
    busy = np.where(tasks.load[path] > 0, tasks.busy_s[tasks.resource[path]], -1.0)
    busiest = tasks.resource[path, busy.argmax(axis=1)]
    kind = np.full(tasks.num_resources, "", dtype=object)
    for name, at in costs.layout.slices_by_kind.items():
        kind[at] = name
    busiest_kind: Labels = kind[busiest].astype(np.str_)
    return busiest_kind


# --- shortening runs of equal rounds ---

_PERIODS = (1, 2, 3, 4)
"""Lengths, in rounds, of the repeating patterns of times that are looked for."""
_STRIDE = 12
"""Rounds are left out in multiples of it; a multiple of every period."""
_WINDOW = 2 * _STRIDE
"""Rounds before a gap in which the pattern has to repeat."""
_STEADY_TOLERANCE = 1e-9
"""Largest relative deviation of steady round times."""


@dataclass(frozen=True, slots=True)
class ShortenedSchedule:
    """An expanded schedule without most of its repeated rounds."""

    expanded: ExpandedSchedule
    gaps: tuple[tuple[int, int], ...]
    """Pairs (index of the kept round after the gap, number of rounds left out)."""

    def skipped_s(self, done_s: Floats) -> float | None:
        """Return the seconds of the rounds left out, given the end times of the kept rounds.

        None if the ranks had not reached a steady state before a gap.
        """
        done = done_s.reshape(self.expanded.symmetry.num_representatives, -1)
        round_times_s = [_steady_round_s(done[:, at - _WINDOW : at]) for at, _ in self.gaps]
        total = 0.0
        for round_s, (_, count) in zip(round_times_s, self.gaps, strict=True):
            if round_s is None:
                return None
            total += round_s * count
        return total


def shortened_schedules(expanded: ExpandedSchedule) -> Iterator[ShortenedSchedule]:
    """Yield shortened versions of ``expanded``, the shortest first; none without repetition."""
    is_repeat = _repeating_rounds(expanded)
    if is_repeat is None:
        return
    for keep in (
        2 * expanded.symmetry.num_representatives + 3 * _WINDOW,
        8 * expanded.symmetry.num_representatives + 16 * _WINDOW,
    ):
        skipped = _rounds_to_skip(is_repeat, keep)
        if skipped.any():
            yield _skip_rounds(expanded, skipped)


def _repeating_rounds(expanded: ExpandedSchedule) -> NDArray[np.bool_] | None:
    """Return which rounds, by index on every rank, repeat the previous round on all ranks.

    None unless all ranks have the same number of rounds, in one chain each.
    """
    rounds, messages = expanded.rounds, expanded.messages
    count = np.bincount(rounds.rank, minlength=expanded.symmetry.num_representatives)
    num = int(count[0])
    chained = np.unique(rounds.later[rounds.earlier == rounds.later - 1])
    if (
        (count != num).any()
        or not num
        or len(chained) != len(rounds) - expanded.symmetry.num_representatives
    ):
        return None
    lane = rounds.lane.reshape(expanded.symmetry.num_representatives, num)
    is_repeat = np.concatenate([[False], (lane[:, 1:] == lane[:, :-1]).all(axis=0)])
    sent_in, received_in = messages.source % num, messages.target % num
    differs = sent_in != received_in
    is_repeat[sent_in[differs]] = is_repeat[received_in[differs]] = False
    order = np.lexsort((messages.source, sent_in))
    rows = np.stack(
        [
            messages.source // num,
            messages.offset,
            messages.stop - messages.start,
            messages.added,
        ],
        axis=1,
    )[order]
    return is_repeat & _equals_previous_round(rows, sent_in[order], num)


def _equals_previous_round(rows: Ints, round_index: Ints, num: int) -> NDArray[np.bool_]:
    """Return for each of ``num`` rounds whether its rows equal those of the previous round."""
    count = np.bincount(round_index, minlength=num)
    previous_count = np.concatenate([[-1], count[:-1]])
    previous_row = np.maximum(np.arange(len(rows)) - count[round_index], 0)
    differs = (rows != rows[previous_row]).any(axis=1)
    has_difference = np.bincount(round_index, weights=differs, minlength=num) > 0
    is_equal: NDArray[np.bool_] = (count == previous_count) & ~has_difference
    return is_equal


def _rounds_to_skip(is_repeat: NDArray[np.bool_], keep: int) -> NDArray[np.bool_]:
    """Return which rounds to leave out: of every run of repeats, all but about ``keep``."""
    skipped = np.zeros_like(is_repeat)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_repeat.astype(np.int8), [0]])))
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        spare = (end - first - keep) // _STRIDE * _STRIDE
        if spare > 0:
            skipped[end - spare : end] = True
    return skipped


def _skip_rounds(expanded: ExpandedSchedule, skipped: NDArray[np.bool_]) -> ShortenedSchedule:
    num, ranks = len(skipped), expanded.symmetry.num_representatives
    kept = np.flatnonzero(~skipped)
    new = np.cumsum(~skipped) - 1
    messages = expanded.messages
    is_kept = ~skipped[messages.source % num]
    fewer = ExpandedMessages(
        _renumber(messages.source[is_kept], num, new, len(kept)),
        _renumber(messages.target[is_kept], num, new, len(kept)),
        messages.start[is_kept],
        messages.stop[is_kept],
        messages.added[is_kept],
        messages.offset[is_kept],
    )
    every = np.arange(ranks * len(kept))
    later = every[every % len(kept) != 0]
    lane = expanded.rounds.lane.reshape(ranks, num)[:, kept].ravel()
    rounds = ExpandedRounds(every // len(kept), lane, later - 1, later)
    gap = np.concatenate([[kept[0]], np.diff(kept) - 1])
    tail = num - 1 - int(kept[-1])
    gaps = [(int(at), int(gap[at])) for at in np.flatnonzero(gap)]
    gaps += [(len(kept), tail)] if tail else []
    return ShortenedSchedule(replace(expanded, rounds=rounds, messages=fewer), tuple(gaps))


def _renumber(index: Ints, num: int, new: Ints, kept: int) -> Ints:
    return index // num * kept + new[index % num]


def _steady_round_s(done: Floats) -> float | None:
    """Return the seconds of a round if all ranks are in a steady state, else None.

    Times may repeat with any of `_PERIODS`; the result is the mean over a period.
    """
    for period in _PERIODS:
        taken = done[:, period:] - done[:, :-period]
        mean = float(taken.mean())
        if np.abs(taken - mean).max() <= _STEADY_TOLERANCE * mean:
            return mean / period
    return None


# --- prices ---

MAX_MESSAGES_WITHOUT_SYMMETRY = 20_000
"""Up to this many messages, tensors with empty chunks are simulated without symmetry."""


@dataclass(frozen=True, slots=True)
class CollectivePrice:
    """The predicted cost of one collective."""

    seconds: float
    bytes_per_link: float
    """Bytes that the busiest host sends to other hosts."""
    core_s: float
    """Core-seconds of all ranks together."""
    num_messages: int
    """Messages of all ranks together."""
    ranks_represented: int
    """Number of ranks that each simulated rank stands for."""
    breakdown_s: Mapping[str, float]
    """The seconds of the critical path by kind of bottleneck."""
    utilization: Mapping[str, float]
    """By kind of resource: the share of the time that the busiest resource is busy."""

    @property
    def bottleneck(self) -> str:
        """Return the kind of resource that takes most of the time."""
        return max(self.breakdown_s, key=lambda kind: self.breakdown_s[kind])


def price(schedule: Schedule, num_bytes: int, cluster: Cluster) -> CollectivePrice:
    """Return the cost of ``schedule`` for a tensor of ``num_bytes`` on ``cluster``.

    Raises:
        ConfigError: The schedule was made for another number of ranks.
        StrettoError: The schedule is too large to simulate, and not symmetric on these hosts.
    """
    expanded = _expand_on_cluster(schedule, num_bytes, cluster)
    costs = cost_resources(expanded, num_bytes, cluster)
    seconds, breakdown_s = _simulate(expanded, costs, num_bytes, cluster)
    extra_s = cluster.native_latency_s if schedule.native and schedule.size > 1 else 0.0
    breakdown_s[LATENCY] += extra_s
    return _make_price(costs, seconds + extra_s, breakdown_s, expanded.symmetry, cluster)


def predict_timelines(schedule: Schedule, num_bytes: int, cluster: Cluster) -> tuple[Timeline, ...]:
    """Return the predicted timelines of the ranks: messages and additions, lane by lane.

    If a shift of the ranks maps the schedule onto itself, only one period of ranks is returned.
    Their spans then name ranks of that period in place of equivalent peers outside it.
    """
    expanded = _expand_on_cluster(schedule, num_bytes, cluster, allow_rotation=False)
    costs = cost_resources(expanded, num_bytes, cluster)
    times = run(costs.tasks)
    spans: list[list[Span]] = [[] for _ in range(expanded.symmetry.num_representatives)]
    starts, ends, num = times.start_s.tolist(), times.end_s.tolist(), costs.num_messages
    begins = num + costs.num_rounds if costs.has_buffered_sends else 0
    for i, size in enumerate(costs.num_bytes.tolist()):
        where = "between hosts" if costs.between[i] else "inside a host"
        source, target = int(costs.source[i]), int(costs.target[i])
        fields = (starts[begins + i], ends[i], -1, round(size))
        spans[source].append(Span(f"send to rank {target}", f"out, {where}", *fields))
        spans[target].append(Span(f"receive from rank {source}", f"in, {where}", *fields))
    for i in np.flatnonzero(costs.tasks.work_s[num : num + costs.num_rounds] > 0).tolist():
        rank, lane = int(expanded.rounds.rank[i]), int(expanded.rounds.lane[i])
        spans[rank].append(Span("add", f"add, lane {lane}", starts[num + i], ends[num + i]))
    ordered = (sorted(each, key=lambda span: (span.end_s, span.start_s)) for each in spans)
    return tuple(Timeline(rank, tuple(rank_spans)) for rank, rank_spans in enumerate(ordered))


def _expand_on_cluster(
    schedule: Schedule, num_bytes: int, cluster: Cluster, *, allow_rotation: bool = True
) -> ExpandedSchedule:
    if schedule.size != cluster.mesh.size:
        raise ConfigError(
            f"{schedule.name} was made for {schedule.size} ranks, the cluster {cluster.name!r} has "
            f"{cluster.mesh.size}; price it on cluster.with_mesh(...)"
        )
    expanded = expand(
        schedule, host_symmetry(schedule, cluster.mesh, allow_rotation=allow_rotation)
    )
    has_empty_chunks = num_bytes < ELEMENT_BYTES * schedule.num_chunks
    if (
        has_empty_chunks  # they break the symmetry of a schedule
        and expanded.symmetry.ranks_represented > 1
        and len(expanded.messages) * expanded.symmetry.ranks_represented
        <= MAX_MESSAGES_WITHOUT_SYMMETRY
    ):
        return expand(schedule)
    return expanded


def _simulate(
    expanded: ExpandedSchedule, costs: ResourceCosts, num_bytes: int, cluster: Cluster
) -> tuple[float, dict[str, float]]:
    """Return the seconds of ``costs`` and their breakdown.

    Many repeated rounds are shortened. The rounds left out take the steady-state time, with the
    same breakdown.
    """
    for shortened in (
        shortened_schedules(expanded) if expanded.symmetry.ranks_represented > 1 else ()
    ):
        shorter_costs = cost_resources(shortened.expanded, num_bytes, cluster)
        times = run(shorter_costs.tasks)
        num = shorter_costs.num_messages
        skipped_s = shortened.skipped_s(times.end_s[num : num + shorter_costs.num_rounds])
        if skipped_s is not None:
            factor = 1 + skipped_s / times.seconds if times.seconds else 1.0
            breakdown_s = {
                kind: factor * took for kind, took in time_breakdown(shorter_costs, times).items()
            }
            return times.seconds + skipped_s, breakdown_s
    times = run(costs.tasks)
    return times.seconds, time_breakdown(costs, times)


def _make_price(
    costs: ResourceCosts,
    seconds: float,
    breakdown_s: Mapping[str, float],
    symmetry: Symmetry,
    cluster: Cluster,
) -> CollectivePrice:
    busy_s, slices_by_kind = costs.tasks.busy_s, costs.layout.slices_by_kind
    utilization = {
        kind: float(busy_s[at].max(initial=0.0)) / seconds if seconds else 0.0
        for kind, at in slices_by_kind.items()
    }
    link_s = float(busy_s[: costs.layout.hosts].max(initial=0.0))
    core_s = float(busy_s[slices_by_kind[CORES]].sum()) * cluster.cpu.cores
    ranks_represented_on_host = symmetry.ranks_represented_on_host(cluster.ranks_per_host[0])
    pools_represented = (
        1
        if cluster.cpu.pool == "shared"
        else symmetry.ranks_represented // ranks_represented_on_host
    )
    link_bytes = link_s * cluster.between.bytes_per_s
    num_messages = costs.num_messages * symmetry.ranks_represented
    return CollectivePrice(
        seconds,
        link_bytes,
        core_s * pools_represented,
        num_messages,
        symmetry.ranks_represented,
        breakdown_s,
        utilization,
    )
