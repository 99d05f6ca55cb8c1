"""Gossip topologies: the peers and weights of each rank in each round, by rank and step.

`TOPOLOGIES` is the table of all topologies by name. The tests of mixing rules run over all of it.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from stretto.errors import ConfigError
from stretto.topology.adpsgd_pairs import (
    OperationKind,
    WorkerOperation,
    passive_peer,
    random_operation_order,
)
from stretto.topology.base_graph import base_graph, hyper_hypercube, hypercube, simple_base_graph
from stretto.topology.graphs import (
    complete,
    derangement,
    equidyn,
    matching,
    one_peer_exponential,
    ring,
    static_exponential,
    undirected_equidyn,
)
from stretto.topology.round_peers import Edge, PeerFunction, RoundPeers, Topology, grouped


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologySettings:
    """Settings of a topology; each topology uses some of them."""

    seed: int = 0
    """Seed of random peers; ignored by topologies without random peers."""
    peers: int = 1
    """Maximum number of peers of a rank in one round, for topologies with this choice."""
    eta: float = 0.5
    """Step size of EquiDyn towards the peer's value, above 0 and below 1."""
    groups: int | None = None
    """Number of groups: ranks of a group average exactly, groups gossip. None: no groups."""


class TopologyEntry(NamedTuple):
    """A row of `TOPOLOGIES`: the function that makes the topology, and the settings it uses."""

    make: Callable[[TopologySettings], Topology]
    used_settings: tuple[str, ...] = ()


TOPOLOGIES: Mapping[str, TopologyEntry] = {
    "complete": TopologyEntry(lambda _: complete()),
    "ring": TopologyEntry(lambda _: ring()),
    "static-exponential": TopologyEntry(lambda _: static_exponential()),
    "one-peer-exponential": TopologyEntry(lambda _: one_peer_exponential()),
    "hypercube": TopologyEntry(lambda _: hypercube()),
    "hyper-hypercube": TopologyEntry(lambda s: hyper_hypercube(s.peers), ("peers",)),
    "simple-base": TopologyEntry(lambda s: simple_base_graph(s.peers), ("peers",)),
    "base": TopologyEntry(lambda s: base_graph(s.peers), ("peers",)),
    "derangement": TopologyEntry(lambda s: derangement(s.seed), ("seed",)),
    "matching": TopologyEntry(lambda s: matching(s.seed), ("seed",)),
    "equidyn": TopologyEntry(lambda s: equidyn(s.seed, s.eta), ("seed", "eta")),
    "undirected-equidyn": TopologyEntry(
        lambda s: undirected_equidyn(s.seed, s.eta), ("seed", "eta")
    ),
}

DEFAULT_SETTINGS = TopologySettings()


def make_topology(name: str, settings: TopologySettings = DEFAULT_SETTINGS) -> Topology:
    """Return the topology ``name``, between groups if ``settings.groups`` is set.

    Raises:
        ConfigError: The name is unknown, or a setting other than the seed has no effect on it.
    """
    if name not in TOPOLOGIES:
        near = difflib.get_close_matches(name, TOPOLOGIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"no topology {name!r}; there are {', '.join(TOPOLOGIES)}{hint}")
    entry = TOPOLOGIES[name]
    for field in fields(TopologySettings):
        ignored = field.name not in ("seed", "groups", *entry.used_settings)
        if ignored and getattr(settings, field.name) != getattr(DEFAULT_SETTINGS, field.name):
            supporting = [
                other for other, row in TOPOLOGIES.items() if field.name in row.used_settings
            ]
            raise ConfigError(
                f"{name} leaves no choice of {field.name}; {', '.join(supporting)} do"
            )
    topology = entry.make(settings)
    return topology if settings.groups is None else grouped(topology, settings.groups)


__all__ = [
    "TOPOLOGIES",
    "Edge",
    "OperationKind",
    "PeerFunction",
    "RoundPeers",
    "Topology",
    "TopologyEntry",
    "TopologySettings",
    "WorkerOperation",
    "base_graph",
    "complete",
    "derangement",
    "equidyn",
    "grouped",
    "hyper_hypercube",
    "hypercube",
    "make_topology",
    "matching",
    "one_peer_exponential",
    "passive_peer",
    "random_operation_order",
    "ring",
    "simple_base_graph",
    "static_exponential",
    "undirected_equidyn",
]
