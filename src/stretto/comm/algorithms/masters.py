"""Hierarchical all-reduce with masters: one rank of each host talks to the other hosts."""

from math import lcm

from stretto.cluster.world import Mesh
from stretto.comm.algorithms.hierarchical import BACK, BETWEEN, INSIDE
from stretto.comm.algorithms.ring import ring, ring_all_gather, ring_reduce_scatter
from stretto.comm.schedule import (
    Action,
    Op,
    Placing,
    Program,
    Schedule,
    in_steps,
    one_after_another,
    pipelined,
)


def masters(mesh: Mesh, parts: int = 1) -> Schedule:
    """Sum at each host's first rank, sum around a ring of these, and share inside hosts.

    4(k-1) alpha_l + about 4 N beta_l inside hosts of k ranks, 2(m-1) alpha + 2 (m-1)/m N beta
    between m of them. Jia et al., 2018, arXiv:1807.11205. Hosts may differ in ranks.

    Inside, a reduction is a ring reduce-scatter whose pieces are then gathered by the master; a
    broadcast is a scatter followed by a ring all-gather. With ``parts`` the phases overlap.
    """
    m = mesh.hosts
    num_chunks = lcm(m, *mesh.ranks_per_host)
    between = ring(m)
    firsts = [mesh.on_host(host).start for host in range(m)]
    even = len(set(mesh.ranks_per_host)) == 1

    def program(rank: int) -> Program:
        local = mesh.on_host(mesh.host_of(rank))
        k = len(local)
        inside = Placing(local, scale=num_chunks // k, lane=INSIDE)
        across = Placing(firsts, scale=num_chunks // m, lane=BETWEEN)
        back = Placing(local, scale=num_chunks // k, lane=BACK)
        is_master = rank == local.start
        return one_after_another(
            inside.program(ring_reduce_scatter(k), rank),
            inside.program(_gather(k), rank),
            across.program(between, rank) if is_master else (),
            back.program(_scatter(k), rank),
            back.program(ring_all_gather(k, informed=0), rank),
        )

    period = mesh.ranks_per_host[0] if even else None
    return pipelined(Schedule("masters", mesh.size, num_chunks, program, period=period), parts)


def _gather(size: int) -> Schedule:
    """Rank 0 takes chunk r from every rank r, one after another."""

    def program(rank: int) -> Program:
        if rank:
            return (Op(Action.SEND, 0, rank, rank + 1),)
        return in_steps([Op(Action.COPY, peer, peer, peer + 1)] for peer in range(1, size))

    return Schedule("gather", size, size, program)


def _scatter(size: int) -> Schedule:
    """Rank 0 gives chunk r to every rank r, one after another."""

    def program(rank: int) -> Program:
        if rank:
            return (Op(Action.COPY, 0, rank, rank + 1),)
        return in_steps([Op(Action.SEND, peer, peer, peer + 1)] for peer in range(1, size))

    return Schedule("scatter", size, size, program)
