"""The topologies by name; whoever is in the table is covered by every law."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from stretto.errors import ConfigError
from stretto.topology.base_graph import base_graph, simple_base_graph
from stretto.topology.circulant import complete, ring
from stretto.topology.equidyn import equidyn, undirected_equidyn
from stretto.topology.exponential import one_peer_exponential, static_exponential
from stretto.topology.grouped import grouped
from stretto.topology.hypercube import hyper_hypercube, hypercube
from stretto.topology.mixing import Topology
from stretto.topology.random_peers import derangement, matching


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a topology may be told."""

    seed: int = 0
    """Of the draws; one that draws nothing does without."""
    peers: int = 1
    """The most peers of a rank in one round, in graphs that leave the choice."""
    eta: float = 0.5
    """How far EquiDyn moves towards a peer."""
    groups: int | None = None
    """Groups that are exact inside and gossip between; none: every rank is one."""


class Entry(NamedTuple):
    """A row of the table: how to make a topology, and which settings it looks at."""

    make: Callable[[Settings], Topology]
    reads: tuple[str, ...] = ()


TOPOLOGIES: Mapping[str, Entry] = {
    "complete": Entry(lambda _: complete()),
    "ring": Entry(lambda _: ring()),
    "static-exponential": Entry(lambda _: static_exponential()),
    "one-peer-exponential": Entry(lambda _: one_peer_exponential()),
    "hypercube": Entry(lambda _: hypercube()),
    "hyper-hypercube": Entry(lambda s: hyper_hypercube(s.peers), ("peers",)),
    "simple-base": Entry(lambda s: simple_base_graph(s.peers), ("peers",)),
    "base": Entry(lambda s: base_graph(s.peers), ("peers",)),
    "derangement": Entry(lambda s: derangement(s.seed), ("seed",)),
    "matching": Entry(lambda s: matching(s.seed), ("seed",)),
    "equidyn": Entry(lambda s: equidyn(s.seed, s.eta), ("seed", "eta")),
    "undirected-equidyn": Entry(lambda s: undirected_equidyn(s.seed, s.eta), ("seed", "eta")),
}

DEFAULTS = Settings()


def named(name: str, settings: Settings = DEFAULTS) -> Topology:
    """Return the topology of that name, over groups where ``settings`` say so.

    A setting that it does not look at, other than the seed, is refused: it would do nothing.
    """
    if name not in TOPOLOGIES:
        near = difflib.get_close_matches(name, TOPOLOGIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"no topology {name!r}; there are {', '.join(TOPOLOGIES)}{hint}")
    entry = TOPOLOGIES[name]
    for field in fields(Settings):
        ignored = field.name not in ("seed", "groups", *entry.reads)
        if ignored and getattr(settings, field.name) != getattr(DEFAULTS, field.name):
            takers = [other for other, row in TOPOLOGIES.items() if field.name in row.reads]
            raise ConfigError(f"{name} leaves no choice of {field.name}; {', '.join(takers)} do")
    topology = entry.make(settings)
    return topology if settings.groups is None else grouped(topology, settings.groups)
