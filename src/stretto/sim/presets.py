"""Clusters by name, for whoever has no calibration: round figures, assumed, not measured."""

import difflib
from collections.abc import Mapping

from stretto.errors import ConfigError
from stretto.sim.cluster import Cluster, Cpu, Transport

_TCP = Cpu(
    cores=8,
    s_per_byte_between=0.6e-9,
    s_per_byte_inside=0.8e-9,
    s_per_message=30e-6,
    s_per_byte_added=0.2e-9,
)
"""Kernel TCP under Gloo: about 1.7 GB/s per core and 30 us of calls and wake-ups a message."""

PRESETS: Mapping[str, Cluster] = {
    "ethernet 10gbit": Cluster(
        name="ethernet 10gbit",
        ranks_per_host=(1,) * 8,
        between=Transport(latency_s=50e-6, bytes_per_s=1.18e9),  # 10 Gbit/s less 6 % headers
        inside=Transport(latency_s=30e-6, bytes_per_s=2e9),
        cpu=_TCP,
        native_latency_s=1e-3,
    ),
    "box 400mbit": Cluster(
        name="box 400mbit",
        ranks_per_host=(1,) * 4,
        between=Transport(latency_s=100e-6, bytes_per_s=47.5e6),  # a token bucket gives TCP 95 %
        inside=Transport(latency_s=60e-6, bytes_per_s=1.5e9),
        cpu=_TCP.model_copy(update={"pool": "shared", "cores": 2.0}),
        native_latency_s=5e-3,
    ),
    "gpu nodes 100gbit": Cluster(
        name="gpu nodes 100gbit",
        ranks_per_host=(8,) * 8,
        between=Transport(latency_s=10e-6, bytes_per_s=12.5e9),
        inside=Transport(latency_s=3e-6, bytes_per_s=150e9),
    ),
}


def preset(name: str) -> Cluster:
    """Return the cluster of that name; raise `ConfigError` with the nearest one if none is."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    raise ConfigError(f"no cluster is called {name!r}{hint} known: {', '.join(PRESETS)}")
