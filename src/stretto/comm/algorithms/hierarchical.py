"""Hierarchical all-reduce: inside hosts, between hosts, inside hosts again."""

from collections.abc import Callable
from dataclasses import replace
from math import isqrt

from stretto.cluster.world import Mesh
from stretto.comm.algorithms.ring import ring, ring_all_gather, ring_reduce_scatter
from stretto.comm.schedule import (
    Action,
    Op,
    Placing,
    Program,
    Schedule,
    one_after_another,
    pipelined,
)

INSIDE, BETWEEN, BACK = 0, 1, 2
"""Lanes: while one part of the tensor is between hosts, the next is being summed inside them."""


def hierarchical(
    mesh: Mesh,
    parts: int = 1,
    inner: Callable[[int], Schedule] = ring,
    name: str = "hierarchical",
) -> Schedule:
    """Reduce-scatter inside each host, all-reduce between hosts, all-gather inside each host.

    2(k-1) alpha_l + 2 (k-1)/k N beta_l inside hosts of k ranks, and the all-reduce of N/k between
    m hosts, ``inner``. The ranks of a host share its link evenly, each carrying 1/k of the tensor
    between hosts, so a link carries 2(m-1)/m of it instead of a flat ring's 2(n-1)/n; with
    ``parts`` the three phases work on different parts at once.

    Where hosts differ in ranks, all take part with as many as the smallest has; the others hand
    their tensor to one of these first and are given the sum at the end.
    """
    k, m = min(mesh.ranks_per_host), mesh.hosts
    even = mesh.size == k * m
    between = inner(m)
    if even and k == 1:  # nothing to do inside hosts
        return pipelined(replace(between, name=name), parts)
    c = between.num_chunks
    scatter, gather = ring_reduce_scatter(k), ring_all_gather(k)
    firsts = [mesh.on_host(host).start for host in range(m)]

    def program(rank: int) -> Program:
        local = mesh.on_host(mesh.host_of(rank))
        place = rank - local.start
        if place >= k:
            return _handed_over(local[place % k], k * c)
        column = range(place, mesh.size, k) if even else [first + place for first in firsts]
        inside = Placing(local[:k], scale=c, lane=INSIDE)
        back = Placing(local[:k], scale=c, lane=BACK)
        across = Placing(column, offset=place * c, lane=BETWEEN)
        extra = local[place + k :: k]
        return one_after_another(
            tuple(Op(Action.ADD, other, 0, k * c, lane=INSIDE) for other in extra),
            inside.program(scatter, rank),
            across.program(between, rank),
            back.program(gather, rank),
            tuple(Op(Action.SEND, other, 0, k * c, lane=BACK) for other in extra),
        )

    shifts = between.period == 1 and even
    whole = Schedule(
        name,
        mesh.size,
        k * c,
        program,
        period=k if shifts else None,
        turn=k if even else None,
    )
    return pipelined(whole, parts)


def torus(mesh: Mesh, parts: int = 1) -> Schedule:
    """Sum over the rows, then the columns, of a grid as near to a square as ``mesh`` allows.

    Rows of X reduce-scatter, columns of Y all-reduce N/X, rows all-gather: 2(X+Y-2) alpha +
    2 (n-1)/n N beta, a ring's bytes in about 4 sqrt(n) steps. Mikami et al., 2018,
    arXiv:1811.05233. A prime number of ranks is a single column: a ring.

    Where all hosts have as many ranks, rows are whole hosts, or hosts are whole rows: a row that
    ended in the middle of a host would give some links twice the messages of others.
    """
    row = _row(mesh)
    return hierarchical(Mesh((row,) * (mesh.size // row)), parts, name="torus")


def _row(mesh: Mesh) -> int:
    """Return the X for which X + Y is least, the smaller one of two."""
    size, even = mesh.size, len(set(mesh.ranks_per_host)) == 1
    k = mesh.ranks_per_host[0] if even else 1
    short = [x for x in range(1, isqrt(size) + 1) if size % x == 0]
    rows = [x for x in (*short, *(size // x for x in short)) if x % k == 0 or k % x == 0]
    return min(rows, key=lambda x: (x + size // x, x))


def _handed_over(peer: int, num_chunks: int) -> Program:
    """Return the program of a rank that ``peer`` takes part for."""
    return one_after_another(
        (Op(Action.SEND, peer, 0, num_chunks, lane=INSIDE),),
        (Op(Action.COPY, peer, 0, num_chunks, lane=BACK),),
    )
