"""The collective algorithms, one a file; whoever is in a table is covered by every law."""

from collections.abc import Callable, Mapping
from functools import partial

from stretto.cluster.world import Mesh
from stretto.comm.algorithms.binary_blocks import binary_blocks
from stretto.comm.algorithms.binomial import binomial, broadcast, scatter_gather
from stretto.comm.algorithms.double_tree import double_tree
from stretto.comm.algorithms.doubling import doubling
from stretto.comm.algorithms.gather_broadcast import gather_broadcast
from stretto.comm.algorithms.halving import doubling_all_gather, halving_reduce_scatter
from stretto.comm.algorithms.halving_doubling import halving_doubling
from stretto.comm.algorithms.hierarchical import hierarchical, torus
from stretto.comm.algorithms.hierarchical_scatter import (
    hierarchical_all_gather,
    hierarchical_reduce_scatter,
)
from stretto.comm.algorithms.in_host import host_all_gather, host_reduce_scatter
from stretto.comm.algorithms.masters import masters
from stretto.comm.algorithms.native import native
from stretto.comm.algorithms.ring import ring, ring_all_gather, ring_reduce_scatter
from stretto.comm.schedule import Schedule, pipelined

Algorithm = Callable[[Mesh, int], Schedule]
"""From hosts and their ranks, and the number of parts that follow each other, to a schedule."""


def _flat(algorithm: Callable[[int], Schedule]) -> Algorithm:
    """For an algorithm to which all ranks are alike: two parts travel beside each other."""
    return lambda mesh, parts: pipelined(algorithm(mesh.size), parts, width=min(parts, 2))


def _phased(algorithm: Callable[[int], Schedule]) -> Algorithm:
    """For one whose phases have lanes of their own: each phase takes one part after another."""
    return lambda mesh, parts: pipelined(algorithm(mesh.size), parts)


ALLREDUCE: Mapping[str, Algorithm] = {
    "native": lambda mesh, _parts: native(mesh.size),
    "gather-broadcast": _phased(gather_broadcast),
    "binomial": _phased(binomial),
    "doubling": _flat(doubling),
    "halving-doubling": _flat(halving_doubling),
    "binary-blocks": _flat(binary_blocks),
    "ring": lambda mesh, parts: ring(mesh.size, parts),
    "double-tree": _flat(double_tree),
    "torus": torus,
    "masters": masters,
    "hierarchical": hierarchical,
    "hierarchical-halving": partial(
        hierarchical, inner=halving_doubling, name="hierarchical-halving"
    ),
    "hierarchical-doubling": partial(hierarchical, inner=doubling, name="hierarchical-doubling"),
}
"""Every rank ends with the sum over ranks, the same bits everywhere."""

REDUCE_SCATTER: Mapping[str, Algorithm] = {
    "ring": lambda mesh, parts: ring_reduce_scatter(mesh.size, parts),
    "halving": lambda mesh, _parts: halving_reduce_scatter(mesh.size),
    "hierarchical": hierarchical_reduce_scatter,
}
"""Rank r ends with the sum of its own chunks; halving takes the tensor whole, in one part."""

ALL_GATHER: Mapping[str, Algorithm] = {
    "ring": lambda mesh, parts: ring_all_gather(mesh.size, parts),
    "doubling": lambda mesh, _parts: doubling_all_gather(mesh.size),
    "hierarchical": hierarchical_all_gather,
}
"""Every rank ends with the chunks of all; doubling takes the tensor whole, in one part."""

HOST_REDUCE_SCATTER: Mapping[str, Algorithm] = {"ring": host_reduce_scatter}
"""The i-th rank of every host ends with the sum, over all ranks, of the i-th rank's chunks."""

HOST_ALL_GATHER: Mapping[str, Algorithm] = {"ring": host_all_gather}
"""Every rank ends with the chunks of all ranks of its host."""

BROADCAST: Mapping[str, Algorithm] = {
    "binomial": _flat(broadcast),
    "scatter-gather": _phased(scatter_gather),
}
"""Every rank ends with what rank 0 had."""

__all__ = [
    "ALLREDUCE",
    "ALL_GATHER",
    "BROADCAST",
    "HOST_ALL_GATHER",
    "HOST_REDUCE_SCATTER",
    "REDUCE_SCATTER",
    "Algorithm",
    "binary_blocks",
    "binomial",
    "broadcast",
    "double_tree",
    "doubling",
    "doubling_all_gather",
    "gather_broadcast",
    "halving_doubling",
    "halving_reduce_scatter",
    "hierarchical",
    "hierarchical_all_gather",
    "hierarchical_reduce_scatter",
    "host_all_gather",
    "host_reduce_scatter",
    "masters",
    "native",
    "ring",
    "ring_all_gather",
    "ring_reduce_scatter",
    "scatter_gather",
    "torus",
]
