"""Reduce-scatter and all-gather where every host has the whole tensor, shared out among its ranks.

The i-th rank of each host owns chunk i of k, so a chunk has an owner on every host: gradients are
summed over all ranks, parameters are gathered without leaving a host. Both collectives cut the
tensor alike: what the first one leaves with a rank is what the second one takes from it.
"""

from dataclasses import replace

from stretto.cluster.world import Mesh
from stretto.comm.algorithms.hierarchical import BETWEEN, INSIDE
from stretto.comm.algorithms.ring import ring, ring_all_gather, ring_reduce_scatter
from stretto.comm.schedule import Op, Placing, Program, Schedule, one_after_another, pipelined
from stretto.errors import ScheduleError

# Names of their own: a courier tells errands apart by name and size, and these differ in lanes.
_SCATTER, _GATHER = "host-reduce-scatter", "host-all-gather"


def host_reduce_scatter(mesh: Mesh, parts: int = 1) -> Schedule:
    """Leave the i-th rank of every host with the sum of chunk i over all ranks of all hosts.

    (k-1) alpha_l + (k-1)/k N beta_l around the ring inside each host, then 2(m-1) alpha +
    2 (m-1)/m N beta around the k rings between hosts, which share the links, N/k each. With
    ``parts`` the two phases work on different parts at once.

    A chunk is summed by one owner and copied by the others: all hosts end with the same bits.
    """
    k, m = _even(mesh, _SCATTER), mesh.hosts
    inside, between = ring_reduce_scatter(k), ring(m)
    two_phases = k > 1 and m > 1

    def program(rank: int) -> Program:
        host, place = divmod(rank, k)
        column = range(place, mesh.size, k)
        local = Placing(mesh.on_host(host), scale=m, lane=INSIDE)
        across = Placing(column, offset=place * m, lane=BETWEEN if two_phases else INSIDE)
        return one_after_another(local.program(inside, rank), across.program(between, rank))

    whole = Schedule(_SCATTER, mesh.size, k * m, program, period=k, turn=k)
    return _in_parts(whole, parts, owners=k, width=1 if two_phases else 2)


def host_all_gather(mesh: Mesh, parts: int = 1) -> Schedule:
    """Give every rank the chunks of all ranks of its host; nothing leaves a host.

    (k-1) alpha_l + (k-1)/k N beta_l.
    """
    k, m = _even(mesh, _GATHER), mesh.hosts
    inside = ring_all_gather(k)

    def program(rank: int) -> Program:
        # A chunk in m pieces here, too: where lengths do not divide, both must round alike.
        return Placing(mesh.on_host(rank // k), scale=m).program(inside, rank)

    whole = Schedule(_GATHER, mesh.size, k * m, program, period=k, turn=k)
    return _in_parts(whole, parts, owners=k, width=2)


def _in_parts(whole: Schedule, parts: int, *, owners: int, width: int) -> Schedule:
    """Let ``parts`` of each owner's chunk follow each other, the chunk staying in one piece.

    As `sliced`, for messages of several chunks: parts of the tensor are taken, and their chunks
    renumbered, from part after part to owner after owner. No message is of two owners' chunks.
    """
    if parts == 1:
        return whole
    # As in a ring, a single phase has two lanes: one part is added while the other travels.
    apart = pipelined(whole, parts, min(parts, width))
    each = whole.num_chunks // owners

    def program(rank: int) -> Program:
        ops: list[Op] = []
        for action, peer, start, stop, after, lane in apart.program(rank):
            part, owner = divmod(start // each, owners)
            first = (owner * parts + part) * each + start % each
            ops.append(Op(action, peer, first, first + stop - start, after, lane))
        return tuple(ops)

    return replace(apart, program=program)


def _even(mesh: Mesh, name: str) -> int:
    """Return how many ranks each host has."""
    if len(set(mesh.ranks_per_host)) != 1:
        raise ScheduleError(
            f"{name}: hosts have {', '.join(map(str, mesh.ranks_per_host))} ranks; to have the "
            "same chunks they must be of equal size: share the tensor out among all ranks instead"
        )
    return mesh.ranks_per_host[0]
