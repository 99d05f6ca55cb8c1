"""What a collective costs on a described cluster, run there as the courier runs it.

On every rank and lane rounds follow each other; a round starts when the one before it and those it
waits for are done; its messages are in flight together; a message starts when both its ends are
there; then what arrived is added, and the round is done. Messages share links, cores and their
ranks' threads fairly (`stretto.sim.engine`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stretto.comm.schedule import Schedule
from stretto.errors import ConfigError
from stretto.sim.alike import Alike, on_hosts
from stretto.sim.chain import spent
from stretto.sim.charge import CORES, ELEMENT_BYTES, LATENCY, Charge, charge
from stretto.sim.cluster import Cluster
from stretto.sim.engine import run
from stretto.sim.outline import Outline, outline
from stretto.sim.repeats import cuts
from stretto.telemetry.timeline import Span, Timeline

FEW_MESSAGES = 20_000
"""Short tensors break the symmetry of a schedule; up to here they are followed without it."""


@dataclass(frozen=True, slots=True)
class Price:
    """What one collective costs."""

    seconds: float
    bytes_per_link: float
    """What the busiest host sends to others."""
    core_s: float
    """Core-seconds, all ranks together."""
    num_messages: int
    """All ranks together."""
    copies: int
    """How many ranks each rank that was followed stands for."""
    spent_s: Mapping[str, float]
    """Where the time goes: the longest chain of messages and additions, by what held each up."""
    busy: Mapping[str, float]
    """For each sort of resource, the share of the time that the busiest of its sort is busy."""

    @property
    def bottleneck(self) -> str:
        """Return what holds it up longest."""
        return max(self.spent_s, key=lambda sort: self.spent_s[sort])


def price(schedule: Schedule, num_bytes: int, cluster: Cluster) -> Price:
    """Return what ``schedule`` costs for a tensor of ``num_bytes`` on ``cluster``.

    Raises:
        ConfigError: The schedule was made for another number of ranks.
        StrettoError: It is too large to be followed, and not symmetric on these hosts.
    """
    laid = _laid_out(schedule, num_bytes, cluster)
    whole = charge(laid, num_bytes, cluster)
    seconds, spent_s = _followed(laid, whole, num_bytes, cluster)
    extra_s = cluster.native_latency_s if schedule.native and schedule.size > 1 else 0.0
    spent_s[LATENCY] += extra_s
    return _bill(whole, seconds + extra_s, spent_s, laid.alike, cluster)


def predict(schedule: Schedule, num_bytes: int, cluster: Cluster) -> tuple[Timeline, ...]:
    """Return what ranks would be seen to do: their messages and additions, lane by lane.

    Of a schedule that a shift of the ranks maps onto itself, one period of ranks, whose spans
    name the ranks of that period that do as their true peers do.
    """
    laid = _laid_out(schedule, num_bytes, cluster, turned=False)
    whole = charge(laid, num_bytes, cluster)
    ran = run(whole.tasks)
    spans: list[list[Span]] = [[] for _ in range(laid.alike.num_ranks)]
    starts, ends, num = ran.start_s.tolist(), ran.end_s.tolist(), whole.num_messages
    begins = num + whole.num_rounds if whole.handed_over else 0
    for i, size in enumerate(whole.num_bytes.tolist()):
        where = "between hosts" if whole.between[i] else "inside a host"
        source, target = int(whole.source[i]), int(whole.target[i])
        about = (starts[begins + i], ends[i], -1, round(size))
        spans[source].append(Span(f"send to rank {target}", f"out, {where}", *about))
        spans[target].append(Span(f"receive from rank {source}", f"in, {where}", *about))
    for i in np.flatnonzero(whole.tasks.work_s[num : num + whole.num_rounds] > 0).tolist():
        rank, lane = int(laid.rounds.rank[i]), int(laid.rounds.lane[i])
        spans[rank].append(Span("add", f"add, lane {lane}", starts[num + i], ends[num + i]))
    ordered = (sorted(of_rank, key=lambda span: (span.end_s, span.start_s)) for of_rank in spans)
    return tuple(Timeline(rank, tuple(of_rank)) for rank, of_rank in enumerate(ordered))


def _laid_out(
    schedule: Schedule, num_bytes: int, cluster: Cluster, *, turned: bool = True
) -> Outline:
    if schedule.size != cluster.mesh.size:
        raise ConfigError(
            f"{schedule.name} was made for {schedule.size} ranks, the cluster {cluster.name!r} has "
            f"{cluster.mesh.size}; price it on cluster.with_mesh(...)"
        )
    laid = outline(schedule, on_hosts(schedule, cluster.mesh, turned=turned))
    short = num_bytes < ELEMENT_BYTES * schedule.num_chunks
    if short and laid.alike.copies > 1 and len(laid.messages) * laid.alike.copies <= FEW_MESSAGES:
        return outline(schedule)
    return laid


def _followed(
    laid: Outline, whole: Charge, num_bytes: int, cluster: Cluster
) -> tuple[float, dict[str, float]]:
    """Run it and say how long it takes, and where the time goes.

    Where many rounds are alike, some of them are run, and the others take the pace that these
    reach and spend it in the same proportions.
    """
    for cut in cuts(laid) if laid.alike.copies > 1 else ():
        shorter = charge(cut.outline, num_bytes, cluster)
        ran = run(shorter.tasks)
        num = shorter.num_messages
        left_out_s = cut.left_out_s(ran.end_s[num : num + shorter.num_rounds])
        if left_out_s is not None:
            factor = 1 + left_out_s / ran.seconds if ran.seconds else 1.0
            spent_s = {sort: factor * took for sort, took in spent(shorter, ran).items()}
            return ran.seconds + left_out_s, spent_s
    ran = run(whole.tasks)
    return ran.seconds, spent(whole, ran)


def _bill(
    whole: Charge, seconds: float, spent_s: Mapping[str, float], alike: Alike, cluster: Cluster
) -> Price:
    busy_s, sorts = whole.tasks.busy_s, whole.sites.sorts
    busy = {
        sort: float(busy_s[at].max(initial=0.0)) / seconds if seconds else 0.0
        for sort, at in sorts.items()
    }
    link_s = float(busy_s[: whole.sites.hosts].max(initial=0.0))
    core_s = float(busy_s[sorts[CORES]].sum()) * cluster.cpu.cores
    on_host = alike.on_host(cluster.ranks_per_host[0])
    everywhere = 1 if cluster.cpu.pool == "shared" else alike.copies // on_host
    link_bytes = link_s * cluster.between.bytes_per_s
    num_messages = whole.num_messages * alike.copies
    return Price(
        seconds, link_bytes, core_s * everywhere, num_messages, alike.copies, spent_s, busy
    )
