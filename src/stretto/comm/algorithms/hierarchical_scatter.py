"""Hierarchical reduce-scatter and all-gather, rank r owning chunk r all the same.

After the sums inside hosts, local rank i holds the chunks of every local rank i, which lie a
host's width apart, so the messages inside hosts are as many as there are hosts: they are sent
together, and inside hosts a message costs little.
"""

from collections.abc import Sequence

from stretto.cluster.world import Mesh
from stretto.comm.algorithms.ring import ring_all_gather, ring_reduce_scatter
from stretto.comm.schedule import Op, Program, Schedule, one_after_another, sliced
from stretto.errors import ScheduleError


def hierarchical_reduce_scatter(mesh: Mesh, parts: int = 1) -> Schedule:
    """Leave rank r with the sum of chunk r, added inside hosts before anything leaves one.

    (k-1) alpha_l + (k-1)/k N beta_l, then (m-1) alpha + (m-1)/m N/k beta.
    """
    k, m = _even(mesh), mesh.hosts
    inside, between = ring_reduce_scatter(k), ring_reduce_scatter(m)

    def program(rank: int) -> Program:
        host, place = divmod(rank, k)
        return one_after_another(
            _inside(inside.program(place), host, k, m, lane=0),
            _between(between.program(host), place, k, lane=1),
        )

    whole = Schedule("hierarchical-reduce-scatter", mesh.size, mesh.size, program, period=k, turn=k)
    return sliced(whole, parts)


def hierarchical_all_gather(mesh: Mesh, parts: int = 1) -> Schedule:
    """Give everybody the chunk r of every rank r, each crossing every host's link once.

    (m-1) alpha + (m-1)/m N/k beta, then (k-1) alpha_l + (k-1)/k N beta_l.
    """
    k, m = _even(mesh), mesh.hosts
    inside, between = ring_all_gather(k), ring_all_gather(m)

    def program(rank: int) -> Program:
        host, place = divmod(rank, k)
        return one_after_another(
            _between(between.program(host), place, k, lane=0),
            _inside(inside.program(place), host, k, m, lane=1),
        )

    whole = Schedule("hierarchical-all-gather", mesh.size, mesh.size, program, period=k, turn=k)
    return sliced(whole, parts)


def _inside(program: Program, host: int, k: int, m: int, lane: int) -> Program:
    """Return a host's ring of ``k``, each chunk i being the chunks i of all ``m`` hosts."""
    return tuple(
        _single(
            op, op.peer + host * k, other * k + op.start, [i * m + other for i in op.after], lane
        )
        for op in program
        for other in range(m)
    )


def _between(program: Program, place: int, k: int, lane: int) -> Program:
    """Return the ring of hosts in which all ranks at ``place`` take part."""
    return tuple(
        _single(op, op.peer * k + place, op.start * k + place, op.after, lane) for op in program
    )


def _single(op: Op, peer: int, chunk: int, after: Sequence[int], lane: int) -> Op:
    return Op(op.action, peer, chunk, chunk + 1, tuple(after), lane)


def _even(mesh: Mesh) -> int:
    """Return how many ranks each host has."""
    if len(set(mesh.ranks_per_host)) != 1:
        raise ScheduleError(
            f"hierarchical: hosts have {', '.join(map(str, mesh.ranks_per_host))} ranks; a chunk "
            "each for every rank needs hosts of equal size: use ring or halving instead"
        )
    return mesh.ranks_per_host[0]
