"""The least that a collective can cost, from one rank's program alone: what is out of the question.

A rank's lane takes its rounds one after another, a round takes as long as its slowest message has
to, and one core does all that a rank's messages ask of it. What ranks lose to each other is left
out, so that a price is never below (a law).
"""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from stretto.comm.schedule import Action, Schedule, chunk_bounds, rounds
from stretto.sim.charge import ELEMENT_BYTES
from stretto.sim.cluster import Cluster
from stretto.sim.price import Price
from stretto.sim.tasks import Floats, Ints, summed

_RANK = 0
"""Whoever has most to do, where ranks differ."""


class LeastPrice:
    """What rank 0 needs for its messages, for a tensor of any size."""

    def __init__(self, schedule: Schedule, cluster: Cluster) -> None:
        self._cluster, self._native = cluster, schedule.native and schedule.size > 1
        self._num_chunks = schedule.num_chunks
        mesh = cluster.mesh
        local = mesh.on_host(mesh.host_of(_RANK))
        cut = rounds(schedule, _RANK)
        lanes: dict[int, int] = defaultdict(lambda: len(lanes))
        self._lane = np.array([lanes[batch.lane] for batch in cut], dtype=np.int64)
        rows = [
            (i, op.start, op.stop, op.peer not in local, op.action is Action.ADD)
            for i, batch in enumerate(cut)
            for op in batch.ops
        ]
        table: Ints = np.array(rows, dtype=np.int64).reshape(-1, 5)
        self._round, self._start, self._stop = table[:, 0], table[:, 1], table[:, 2]
        self._between, self._adds = table[:, 3] > 0, table[:, 4] > 0
        sends = [op.action is Action.SEND for batch in cut for op in batch.ops]
        self._sends = np.array(sends, dtype=np.bool_)

    def seconds(self, num_bytes: int) -> float:
        """Return what no price of a tensor of ``num_bytes`` is below."""
        cluster, cpu = self._cluster, self._cluster.cpu
        size, sent = self._sizes(num_bytes)
        out, inside = cluster.between, cluster.inside
        latency = np.where(self._between, out.latency_s, inside.latency_s)
        wire = size / np.where(self._between, out.bytes_per_s, inside.bytes_per_s)
        per_byte = np.where(self._between, cpu.s_per_byte_between, cpu.s_per_byte_inside)
        core = np.where(sent, (size * per_byte + cpu.s_per_message) / 2, 0.0)
        buffered = np.where(self._between, out.buffered_bytes, inside.buffered_bytes)
        waited = np.where(self._sends, np.maximum(size - buffered, 0.0), size)
        whole = np.maximum(wire, core) * np.divide(waited, size, where=size > 0, out=waited * 0)
        each = np.where(sent, latency + whole, 0.0)
        took = np.zeros(len(self._lane))
        np.maximum.at(took, self._round, each)
        took += summed(self._round, size * self._adds * cpu.s_per_byte_added, len(took))
        lanes_s = np.bincount(self._lane, weights=took).max(initial=0.0)
        extra_s = cluster.native_latency_s if self._native else 0.0
        return max(float(lanes_s), float(core.sum())) + extra_s

    def _sizes(self, num_bytes: int) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the least size of every message, and which are sent at all."""
        numel, chunks = -(-num_bytes // ELEMENT_BYTES), self._num_chunks
        if numel >= chunks:
            size = (self._stop - self._start).astype(np.float64) * (num_bytes / chunks)
            return size, np.ones(len(size), dtype=np.bool_)
        bounds = np.array(chunk_bounds(numel, chunks), dtype=np.int64)
        return np.zeros(len(self._start)), bounds[self._stop] > bounds[self._start]


def least_in_parts(whole: Price, parts: int, cluster: Cluster) -> float:
    """Return what no price in ``parts`` is below, given that of the whole.

    No link carries less, and the cores have as many bytes to move and add, and more messages.
    """
    pools = 1 if cluster.cpu.pool == "shared" else cluster.mesh.hosts
    more_s = (parts - 1) * whole.num_messages * cluster.cpu.s_per_message
    evenly_s = (whole.core_s + more_s) / (cluster.cpu.cores * pools)
    return max(evenly_s, max(whole.busy.values()) * whole.seconds)
