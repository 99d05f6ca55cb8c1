"""Collectives that know about hosts: fast links inside a host, slow links between hosts.

- `hierarchical`: reduce-scatter inside hosts, all-reduce between hosts, all-gather inside hosts.
- `torus`: the same on the rows and columns of a grid of ranks.
- `masters`: only one rank of each host communicates with other hosts.
- `hierarchical_reduce_scatter`, `hierarchical_all_gather`: rank r of n owns chunk r of n.
- `host_reduce_scatter`, `host_all_gather`: each host has the whole tensor, divided among its ranks.

Costs are written for m hosts of k ranks, n = m k, N bytes, alpha seconds a message and beta seconds
a byte between hosts, alpha_l and beta_l inside a host.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isqrt, lcm

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms.ring import ring, ring_all_gather, ring_reduce_scatter
from stretto.collectives.schedule import (
    Action,
    Op,
    Program,
    Schedule,
    SubgroupMapping,
    chain_programs,
    chain_steps,
    pipeline_chunks,
    pipeline_tensor,
)
from stretto.errors import ScheduleError

INTRA_HOST_LANE, INTER_HOST_LANE, INTRA_HOST_RETURN_LANE = 0, 1, 2
"""One lane for each phase: while one part is summed between hosts, the next is summed inside."""


def hierarchical(
    mesh: Mesh,
    parts: int = 1,
    inner: Callable[[int], Schedule] = ring,
    name: str = "hierarchical",
) -> Schedule:
    """Reduce-scatter inside each host, all-reduce between hosts, all-gather inside each host.

    Cost: 2(k-1) alpha_l + 2 (k-1)/k N beta_l inside hosts, plus the all-reduce ``inner`` of N/k
    between m hosts. Each rank sends 1/k of the tensor between hosts, so the link of a host carries
    2(m-1)/m N instead of a flat ring's 2(n-1)/n N. With ``parts``, the phases form a pipeline.

    If hosts differ in size, k is that of the smallest. On larger hosts, each further rank sends its
    tensor to one of the first k ranks before, and receives the sum after.
    """
    k, m = min(mesh.ranks_per_host), mesh.hosts
    is_even = mesh.size == k * m
    inter_host_schedule = inner(m)
    if is_even and k == 1:  # there is nothing to sum inside hosts
        return pipeline_tensor(replace(inter_host_schedule, name=name), parts)
    c = inter_host_schedule.num_chunks
    scatter, gather = ring_reduce_scatter(k), ring_all_gather(k)
    first_ranks = [mesh.ranks_on_host(host).start for host in range(m)]

    def program(rank: int) -> Program:
        host_ranks = mesh.ranks_on_host(mesh.host_of(rank))
        local_rank = rank - host_ranks.start
        if local_rank >= k:
            return _represented_rank_program(host_ranks[local_rank % k], k * c)
        column = (
            range(local_rank, mesh.size, k)
            if is_even
            else [first + local_rank for first in first_ranks]
        )
        intra_host = SubgroupMapping(host_ranks[:k], scale=c, lane=INTRA_HOST_LANE)
        intra_host_return = SubgroupMapping(host_ranks[:k], scale=c, lane=INTRA_HOST_RETURN_LANE)
        inter_host = SubgroupMapping(column, offset=local_rank * c, lane=INTER_HOST_LANE)
        represented_ranks = host_ranks[local_rank + k :: k]
        return chain_programs(
            _whole_tensor_ops(Action.ADD, represented_ranks, k * c, INTRA_HOST_LANE),
            intra_host.program(scatter, rank),
            inter_host.program(inter_host_schedule, rank),
            intra_host_return.program(gather, rank),
            _whole_tensor_ops(Action.SEND, represented_ranks, k * c, INTRA_HOST_RETURN_LANE),
        )

    is_shift_invariant = inter_host_schedule.period == 1 and is_even
    full_schedule = Schedule(
        name,
        mesh.size,
        k * c,
        program,
        period=k if is_shift_invariant else None,
        rotation_block=k if is_even else None,
    )
    return pipeline_tensor(full_schedule, parts)


def torus(mesh: Mesh, parts: int = 1) -> Schedule:
    """All-reduce over the rows and columns of a grid, as near to a square as ``mesh`` allows.

    Rows of X ranks reduce-scatter, columns of Y ranks all-reduce N/X, rows all-gather.
    Cost: 2(X+Y-2) alpha + 2 (n-1)/n N beta, a ring's bytes in about 4 sqrt(n) steps. Mikami et al.,
    2018, arXiv:1811.05233. A prime number of ranks forms a single column: a ring.

    If all hosts have the same size, a row consists of whole hosts or a host of whole rows. A row
    that ends in the middle of a host would give some links twice the messages of others.
    """
    row = _row_length(mesh)
    return hierarchical(Mesh((row,) * (mesh.size // row)), parts, name="torus")


def _row_length(mesh: Mesh) -> int:
    """Return the row length X for which X + Y is smallest; of two such, the smaller X."""
    size, is_even = mesh.size, len(set(mesh.ranks_per_host)) == 1
    k = mesh.ranks_per_host[0] if is_even else 1
    short = [x for x in range(1, isqrt(size) + 1) if size % x == 0]
    rows = [x for x in (*short, *(size // x for x in short)) if x % k == 0 or k % x == 0]
    return min(rows, key=lambda x: (x + size // x, x))


def _represented_rank_program(peer: int, num_chunks: int) -> Program:
    """Return the program of a rank that ``peer`` represents: send the tensor, receive the sum."""
    return chain_programs(
        _whole_tensor_ops(Action.SEND, [peer], num_chunks, INTRA_HOST_LANE),
        _whole_tensor_ops(Action.COPY, [peer], num_chunks, INTRA_HOST_RETURN_LANE),
    )


def _whole_tensor_ops(action: Action, peers: Sequence[int], num_chunks: int, lane: int) -> Program:
    """Return one operation on all chunks for each of ``peers``, none waiting for another."""
    return tuple(Op(action, peer, 0, num_chunks, lane=lane) for peer in peers)


def masters(mesh: Mesh, parts: int = 1) -> Schedule:
    """All-reduce in which only the first rank of each host, its master, sends between hosts.

    Each host reduces to its master, the masters all-reduce in a ring, and each master broadcasts.
    Cost: 4(k-1) alpha_l + about 4 N beta_l inside hosts, 2(m-1) alpha + 2 (m-1)/m N beta between
    them. Jia et al., 2018, arXiv:1807.11205. Hosts may differ in size.

    Inside a host, the reduction is a ring reduce-scatter and a gather to the master. The broadcast
    is a scatter and a ring all-gather. With ``parts``, the phases form a pipeline.
    """
    m = mesh.hosts
    num_chunks = lcm(m, *mesh.ranks_per_host)
    inter_host_schedule = ring(m)
    first_ranks = [mesh.ranks_on_host(host).start for host in range(m)]
    is_even = len(set(mesh.ranks_per_host)) == 1

    def program(rank: int) -> Program:
        host_ranks = mesh.ranks_on_host(mesh.host_of(rank))
        k = len(host_ranks)
        intra_host = SubgroupMapping(host_ranks, scale=num_chunks // k, lane=INTRA_HOST_LANE)
        inter_host = SubgroupMapping(first_ranks, scale=num_chunks // m, lane=INTER_HOST_LANE)
        intra_host_return = SubgroupMapping(
            host_ranks, scale=num_chunks // k, lane=INTRA_HOST_RETURN_LANE
        )
        is_master = rank == host_ranks.start
        return chain_programs(
            intra_host.program(ring_reduce_scatter(k), rank),
            intra_host.program(_gather_to_root(k), rank),
            inter_host.program(inter_host_schedule, rank) if is_master else (),
            intra_host_return.program(_scatter_from_root(k), rank),
            intra_host_return.program(ring_all_gather(k, complete_rank=0), rank),
        )

    period = mesh.ranks_per_host[0] if is_even else None
    return pipeline_tensor(
        Schedule("masters", mesh.size, num_chunks, program, period=period), parts
    )


def _gather_to_root(size: int) -> Schedule:
    """Return the schedule in which rank 0 receives chunk r from every rank r, one by one."""

    def program(rank: int) -> Program:
        if rank:
            return (Op(Action.SEND, 0, rank, rank + 1),)
        return chain_steps([Op(Action.COPY, peer, peer, peer + 1)] for peer in range(1, size))

    return Schedule("gather", size, size, program)


def _scatter_from_root(size: int) -> Schedule:
    """Return the schedule in which rank 0 sends chunk r to every rank r, one by one."""

    def program(rank: int) -> Program:
        if rank:
            return (Op(Action.COPY, 0, rank, rank + 1),)
        return chain_steps([Op(Action.SEND, peer, peer, peer + 1)] for peer in range(1, size))

    return Schedule("scatter", size, size, program)


# --- reduce-scatter and all-gather, with chunk r owned by rank r ---
#
# Local rank i of each host handles the chunks of local rank i of all hosts. These chunks are k
# apart, so each message inside a host is split into m messages. They are sent together, and a
# message inside a host costs little.


def hierarchical_reduce_scatter(mesh: Mesh, parts: int = 1) -> Schedule:
    """Reduce-scatter that sums inside hosts before it sends between hosts.

    Rank r ends with the sum of chunk r. Cost: (k-1) alpha_l + (k-1)/k N beta_l, then (m-1) alpha +
    (m-1)/m N/k beta.

    Raises:
        ScheduleError: Hosts differ in size.
    """
    k, m = _even_ranks_per_host(mesh), mesh.hosts
    intra_host_schedule, inter_host_schedule = ring_reduce_scatter(k), ring_reduce_scatter(m)

    def program(rank: int) -> Program:
        host, local_rank = divmod(rank, k)
        return chain_programs(
            _intra_host_program(intra_host_schedule.program(local_rank), host, k, m, lane=0),
            _inter_host_program(inter_host_schedule.program(host), local_rank, k, lane=1),
        )

    full_schedule = Schedule(
        "hierarchical-reduce-scatter", mesh.size, mesh.size, program, period=k, rotation_block=k
    )
    return pipeline_chunks(full_schedule, parts)


def hierarchical_all_gather(mesh: Mesh, parts: int = 1) -> Schedule:
    """All-gather in which each chunk crosses the link of every host only once.

    Every rank ends with the chunk r of every rank r. Cost: (m-1) alpha + (m-1)/m N/k beta, then
    (k-1) alpha_l + (k-1)/k N beta_l.

    Raises:
        ScheduleError: Hosts differ in size.
    """
    k, m = _even_ranks_per_host(mesh), mesh.hosts
    intra_host_schedule, inter_host_schedule = ring_all_gather(k), ring_all_gather(m)

    def program(rank: int) -> Program:
        host, local_rank = divmod(rank, k)
        return chain_programs(
            _inter_host_program(inter_host_schedule.program(host), local_rank, k, lane=0),
            _intra_host_program(intra_host_schedule.program(local_rank), host, k, m, lane=1),
        )

    full_schedule = Schedule(
        "hierarchical-all-gather", mesh.size, mesh.size, program, period=k, rotation_block=k
    )
    return pipeline_chunks(full_schedule, parts)


def _intra_host_program(program: Program, host: int, k: int, m: int, lane: int) -> Program:
    """Map a ring of ``k`` ranks to ``host``; its chunk i becomes the chunks of local rank i."""
    return tuple(
        _single_chunk_op(
            op, op.peer + host * k, other * k + op.start, [i * m + other for i in op.after], lane
        )
        for op in program
        for other in range(m)
    )


def _inter_host_program(program: Program, local_rank: int, k: int, lane: int) -> Program:
    """Map a ring of hosts to the ranks with ``local_rank`` on all hosts."""
    return tuple(
        _single_chunk_op(op, op.peer * k + local_rank, op.start * k + local_rank, op.after, lane)
        for op in program
    )


def _single_chunk_op(op: Op, peer: int, chunk: int, after: Sequence[int], lane: int) -> Op:
    return Op(op.action, peer, chunk, chunk + 1, tuple(after), lane)


def _even_ranks_per_host(mesh: Mesh) -> int:
    """Return the number of ranks of each host; raise `ScheduleError` if hosts differ."""
    if len(set(mesh.ranks_per_host)) != 1:
        raise ScheduleError(
            f"hierarchical: hosts have {', '.join(map(str, mesh.ranks_per_host))} ranks; a chunk "
            "each for every rank needs hosts of equal size: use ring or halving instead"
        )
    return mesh.ranks_per_host[0]


# --- reduce-scatter and all-gather, with the whole tensor on every host (hybrid sharding) ---
#
# The i-th rank of each host owns chunk i of k, so every host has an owner of every chunk. Gradients
# are summed over all ranks; parameters are gathered inside hosts only. Both collectives cut the
# tensor in the same way, so a rank owns the same elements in both.


# Own names: `CollectiveExecutor` tells schedules apart by name and size; these differ in lanes.
_HOST_REDUCE_SCATTER_NAME, _HOST_ALL_GATHER_NAME = "host-reduce-scatter", "host-all-gather"


def host_reduce_scatter(mesh: Mesh, parts: int = 1) -> Schedule:
    """Reduce-scatter over all ranks, with the i-th rank of every host as owner of chunk i.

    Cost: (k-1) alpha_l + (k-1)/k N beta_l around a ring inside each host, then 2(m-1) alpha +
    2 (m-1)/m N beta around k rings between hosts, which share the links with N/k each. With
    ``parts``, the two phases form a pipeline.

    A chunk is summed by one owner and copied by the others, so all hosts have the same bits.

    Raises:
        ScheduleError: Hosts differ in size.
    """
    k, m = _even_ranks_for(mesh, _HOST_REDUCE_SCATTER_NAME), mesh.hosts
    intra_host_schedule, inter_host_schedule = ring_reduce_scatter(k), ring(m)
    two_phases = k > 1 and m > 1

    def program(rank: int) -> Program:
        host, local_rank = divmod(rank, k)
        column = range(local_rank, mesh.size, k)
        intra_host = SubgroupMapping(mesh.ranks_on_host(host), scale=m, lane=INTRA_HOST_LANE)
        inter_host = SubgroupMapping(
            column, offset=local_rank * m, lane=INTER_HOST_LANE if two_phases else INTRA_HOST_LANE
        )
        return chain_programs(
            intra_host.program(intra_host_schedule, rank),
            inter_host.program(inter_host_schedule, rank),
        )

    full_schedule = Schedule(
        _HOST_REDUCE_SCATTER_NAME, mesh.size, k * m, program, period=k, rotation_block=k
    )
    return _pipeline_owner_chunks(full_schedule, parts, owners=k, width=1 if two_phases else 2)


def host_all_gather(mesh: Mesh, parts: int = 1) -> Schedule:
    """All-gather inside each host: every rank ends with the chunks of all ranks of its host.

    Cost: (k-1) alpha_l + (k-1)/k N beta_l.

    Raises:
        ScheduleError: Hosts differ in size.
    """
    k, m = _even_ranks_for(mesh, _HOST_ALL_GATHER_NAME), mesh.hosts
    intra_host_schedule = ring_all_gather(k)

    def program(rank: int) -> Program:
        # Each chunk is cut into m, as in the reduce-scatter, so that both round lengths alike.
        return SubgroupMapping(mesh.ranks_on_host(rank // k), scale=m).program(
            intra_host_schedule, rank
        )

    full_schedule = Schedule(
        _HOST_ALL_GATHER_NAME, mesh.size, k * m, program, period=k, rotation_block=k
    )
    return _pipeline_owner_chunks(full_schedule, parts, owners=k, width=2)


def _pipeline_owner_chunks(
    full_schedule: Schedule, parts: int, *, owners: int, width: int
) -> Schedule:
    """Cut every owner's chunk into ``parts`` that form a pipeline; a chunk stays in one range.

    Like `pipeline_chunks`, for schedules whose messages have several chunks. The tensor is cut into
    parts, and chunks are renumbered from part-by-part to owner-by-owner order. No message has
    chunks of two owners.
    """
    if parts == 1:
        return full_schedule
    # As in a ring, a single phase has two lanes: one part is added while another is sent.
    pipelined = pipeline_tensor(full_schedule, parts, min(parts, width))
    chunks_per_owner = full_schedule.num_chunks // owners

    def program(rank: int) -> Program:
        ops: list[Op] = []
        for action, peer, start, stop, after, lane in pipelined.program(rank):
            part, owner = divmod(start // chunks_per_owner, owners)
            first = (owner * parts + part) * chunks_per_owner + start % chunks_per_owner
            ops.append(Op(action, peer, first, first + stop - start, after, lane))
        return tuple(ops)

    return replace(pipelined, program=program)


def _even_ranks_for(mesh: Mesh, name: str) -> int:
    """Return the number of ranks of each host; raise `ScheduleError` if hosts differ."""
    if len(set(mesh.ranks_per_host)) != 1:
        raise ScheduleError(
            f"{name}: hosts have {', '.join(map(str, mesh.ranks_per_host))} ranks; to have the "
            "same chunks they must be of equal size: divide the tensor among all ranks instead"
        )
    return mesh.ranks_per_host[0]
