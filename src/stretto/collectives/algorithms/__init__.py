"""The collective algorithms, and the tables that name them.

Everything in a table is tested by every law of `tests/laws/test_schedules.py`. Costs are written
with n ranks, N bytes, alpha seconds a message and beta seconds a byte; alpha_l and beta_l are those
inside a host.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms.halving_doubling import (
    binary_blocks,
    doubling,
    doubling_all_gather,
    halving_doubling,
    halving_reduce_scatter,
)
from stretto.collectives.algorithms.hierarchical import (
    hierarchical,
    hierarchical_all_gather,
    hierarchical_reduce_scatter,
    host_all_gather,
    host_reduce_scatter,
    masters,
    torus,
)
from stretto.collectives.algorithms.ring import ring, ring_all_gather, ring_reduce_scatter
from stretto.collectives.algorithms.trees import (
    binomial,
    broadcast,
    double_tree,
    gather_broadcast,
    scatter_gather,
)
from stretto.collectives.schedule import Schedule, pipeline_tensor


def native(size: int) -> Schedule:
    """All-reduce by the back end's own call, modelled as a ring, which is Gloo's default."""
    return replace(ring(size), name="native", native=True)


Algorithm = Callable[[Mesh, int], Schedule]
"""Returns the schedule for a mesh (hosts and their ranks) and a number of pipelined parts."""


def _pipelined_in_two_lanes(algorithm: Callable[[int], Schedule]) -> Algorithm:
    """Pipeline an algorithm with two copies of each lane, so that two parts run concurrently."""
    return lambda mesh, parts: pipeline_tensor(algorithm(mesh.size), parts, width=min(parts, 2))


def _pipelined_by_phase(algorithm: Callable[[int], Schedule]) -> Algorithm:
    """Pipeline an algorithm whose phases have their own lanes: each phase takes part after part."""
    return lambda mesh, parts: pipeline_tensor(algorithm(mesh.size), parts)


ALLREDUCE: Mapping[str, Algorithm] = {
    "native": lambda mesh, _parts: native(mesh.size),
    "gather-broadcast": _pipelined_by_phase(gather_broadcast),
    "binomial": _pipelined_by_phase(binomial),
    "doubling": _pipelined_in_two_lanes(doubling),
    "halving-doubling": _pipelined_in_two_lanes(halving_doubling),
    "binary-blocks": _pipelined_in_two_lanes(binary_blocks),
    "ring": lambda mesh, parts: ring(mesh.size, parts),
    "double-tree": _pipelined_in_two_lanes(double_tree),
    "torus": torus,
    "masters": masters,
    "hierarchical": hierarchical,
    "hierarchical-halving": partial(
        hierarchical, inner=halving_doubling, name="hierarchical-halving"
    ),
    "hierarchical-doubling": partial(hierarchical, inner=doubling, name="hierarchical-doubling"),
}
"""All-reduces: every rank ends with the sum over ranks, with the same bits everywhere."""

REDUCE_SCATTER: Mapping[str, Algorithm] = {
    "ring": lambda mesh, parts: ring_reduce_scatter(mesh.size, parts),
    "halving": lambda mesh, _parts: halving_reduce_scatter(mesh.size),
    "hierarchical": hierarchical_reduce_scatter,
}
"""Reduce-scatters: rank r ends with the sum of its own chunks. "halving" ignores ``parts``."""

ALL_GATHER: Mapping[str, Algorithm] = {
    "ring": lambda mesh, parts: ring_all_gather(mesh.size, parts),
    "doubling": lambda mesh, _parts: doubling_all_gather(mesh.size),
    "hierarchical": hierarchical_all_gather,
}
"""All-gathers: every rank ends with the chunks of all ranks. "doubling" ignores ``parts``."""

HOST_REDUCE_SCATTER: Mapping[str, Algorithm] = {"ring": host_reduce_scatter}
"""Reduce-scatters inside hosts: the i-th rank of every host ends with the sum over all ranks of the
i-th chunk."""

HOST_ALL_GATHER: Mapping[str, Algorithm] = {"ring": host_all_gather}
"""All-gathers inside hosts: every rank ends with the chunks of all ranks of its host."""

BROADCAST: Mapping[str, Algorithm] = {
    "binomial": _pipelined_in_two_lanes(broadcast),
    "scatter-gather": _pipelined_by_phase(scatter_gather),
}
"""Broadcasts: every rank ends with the tensor of rank 0."""


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
