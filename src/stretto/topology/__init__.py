"""Topologies: who talks to whom in each round of gossip, as pure functions of rank and step."""

from stretto.topology.base_graph import base_graph, simple_base_graph
from stretto.topology.circulant import complete, ring
from stretto.topology.equidyn import equidyn, undirected_equidyn
from stretto.topology.exponential import one_peer_exponential, static_exponential
from stretto.topology.grouped import grouped
from stretto.topology.hypercube import hyper_hypercube, hypercube
from stretto.topology.mixing import Edge, Mixing, Peers, Topology
from stretto.topology.random_events import Act, Event, passive_peer, random_events
from stretto.topology.random_peers import derangement, matching
from stretto.topology.table import TOPOLOGIES, Entry, Settings, named

__all__ = [
    "TOPOLOGIES",
    "Act",
    "Edge",
    "Entry",
    "Event",
    "Mixing",
    "Peers",
    "Settings",
    "Topology",
    "base_graph",
    "complete",
    "derangement",
    "equidyn",
    "grouped",
    "hyper_hypercube",
    "hypercube",
    "matching",
    "named",
    "one_peer_exponential",
    "passive_peer",
    "random_events",
    "ring",
    "simple_base_graph",
    "static_exponential",
    "undirected_equidyn",
]
