"""From a cluster's description, or from lines through measured messages, to a profile's link."""

from pathlib import Path
from typing import NamedTuple

from stretto.cluster.world import Mesh
from stretto.comm.algorithms import ALL_GATHER, HOST_ALL_GATHER, REDUCE_SCATTER
from stretto.comm.schedule import Schedule
from stretto.plan.profile import Link
from stretto.sim.cluster import Cluster, load_cluster
from stretto.sim.presets import PRESETS, preset
from stretto.sim.price import price

_CHUNK_BYTES = 4_000, 4_000_000
"""Of one rank: of messages that are nearly all latency, and of those that are nearly all bytes."""
_EFFICIENCY = 0.9
_LEAST_BLOCK, _MOST_BLOCK = 1_000_000, 500_000_000


class Line(NamedTuple):
    """What a message takes: so much for any, so much for each byte of its tensor."""

    latency_s: float
    s_per_byte: float


def described(word: str) -> Cluster:
    """Return the cluster of a file that `stretto calibrate` wrote, or of a name.

    Raises:
        ConfigError: There is neither.
    """
    return preset(word) if word in PRESETS or "." not in word else load_cluster(Path(word))


def link_from_cluster(cluster: Cluster, mesh: Mesh | None = None, *, lanes: int = 1) -> Link:
    """Return what messages of a sharded run share on ``cluster``, as it is or on another mesh.

    Reductions and gathers are priced as they are run: around a ring, n - 1 messages one after
    another; where hosts have several ranks, as many on each, inside hosts and between them.
    """
    there = cluster if mesh is None else cluster.with_mesh(mesh)
    nested = is_nested(there.mesh)
    name = "hierarchical" if nested else "ring"
    both = (table[name](there.mesh, 1) for table in (REDUCE_SCATTER, ALL_GATHER))
    across = _mean(*(_priced(schedule, there) for schedule in both))
    inside = _priced(HOST_ALL_GATHER["ring"](there.mesh, 1), there) if nested else None
    return link_of(there.mesh, across, inside, lanes=lanes)


def is_nested(mesh: Mesh) -> bool:
    """Say whether there are several hosts with several ranks, as many on each."""
    return mesh.hosts > 1 and set(mesh.ranks_per_host) not in ({1}, set()) and _is_even(mesh)


def _is_even(mesh: Mesh) -> bool:
    return len(set(mesh.ranks_per_host)) == 1


def _priced(schedule: Schedule, cluster: Cluster) -> Line:
    """Return the line through the prices of a short and of a long tensor."""
    short, long = (chunk * cluster.mesh.size for chunk in _CHUNK_BYTES)
    short_s, long_s = (price(schedule, size, cluster).seconds for size in (short, long))
    s_per_byte = (long_s - short_s) / (long - short)
    return Line(max(0.0, short_s - s_per_byte * short), s_per_byte)


def _mean(one: Line, other: Line) -> Line:
    latency_s, s_per_byte = ((a + b) / 2 for a, b in zip(one, other, strict=True))
    return Line(latency_s, s_per_byte)


def link_of(mesh: Mesh, across: Line, inside: Line | None = None, *, lanes: int = 1) -> Link:
    """Return the link whose messages take as long as the lines say.

    ``across`` is a reduction or gather over all ranks, ``inside`` a gather inside hosts; the latter
    is only asked for where `is_nested`.
    """
    if mesh.size == 1:
        return Link(ranks=1, bytes_per_s=1 / across.s_per_byte if across.s_per_byte else 1.0)
    if inside is None or not is_nested(mesh):
        share = (mesh.size - 1) / mesh.size
        hosts = mesh.hosts if _is_even(mesh) and not is_nested(mesh) else 1
        return Link(
            ranks=mesh.size,
            latency_s=across.latency_s,
            bytes_per_s=share / across.s_per_byte,
            lanes=lanes,
            hosts=hosts,
        )
    hosts, each = mesh.hosts, mesh.ranks_per_host[0]
    # What is left of a message between hosts once its part inside them is taken away.
    between_s = max(across.s_per_byte - inside.s_per_byte / hosts, across.s_per_byte / 100)
    return Link(
        ranks=mesh.size,
        latency_s=max(0.0, across.latency_s - inside.latency_s),
        bytes_per_s=(hosts - 1) / hosts / between_s,
        lanes=lanes,
        hosts=hosts,
        inner_latency_s=inside.latency_s,
        inner_bytes_per_s=(each - 1) / each / inside.s_per_byte,
    )


def block_bytes(link: Link) -> int:
    """Return the bytes up to which small neighbours are worth joining.

    A message of so many reaches nine tenths of the rate; 1 MB at least and 500 MB at most.
    """
    worth = _EFFICIENCY / (1 - _EFFICIENCY) * link.latency_s * link.bytes_per_s
    return round(min(max(worth, _LEAST_BLOCK), _MOST_BLOCK))
