"""The description of a cluster: hosts, ranks, and the costs of links and CPU cores.

`stretto calibrate` writes it as TOML, or people do. All predictions read it. `PRESETS` are round
figures for clusters without a calibration; they are assumed, not measured.
"""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field

from stretto.cluster.world import Mesh
from stretto.config import Config, load
from stretto.config.formatting import toml_value
from stretto.errors import ConfigError
from stretto.telemetry.sinks import write_atomically

_HOSTS_BY_RANKS = re.compile(r"\s*([0-9]+)\s*x\s*([0-9]+)\s*")
_MAX_RANKS = 1_000_000


def _parse_ranks_per_host(value: object) -> object:
    """Expand ``"4x2"`` to four hosts of two ranks; a list gives the ranks of each host."""
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    match = _HOSTS_BY_RANKS.fullmatch(value)
    hosts, ranks = (int(group) for group in match.groups()) if match else (0, 0)
    if not 0 < hosts * ranks <= _MAX_RANKS:
        raise ValueError(
            f'expected hosts x ranks such as "4x2", at most {_MAX_RANKS:,} ranks, or a list '
            f"with the ranks of each host, got {value!r}"
        )
    return (ranks,) * hosts


class LinkCosts(Config):
    """The linear cost of a message on a link: a latency, and a time per byte."""

    latency_s: Annotated[float, Field(ge=0)]
    """Seconds until the first byte arrives, once sender and receiver are ready."""
    bytes_per_s: Annotated[float, Field(gt=0)]
    """Between hosts: the rate of each host's link in either direction, shared by its ranks.
    Inside a host: the rate that a single message can reach."""
    buffered_bytes: Annotated[float, Field(ge=0)] = 0.0
    """Bytes at the end of a message that the kernel's socket buffers: the sender continues while
    they are still in transit. 0 where sender and receiver end together."""
    queued_bytes: Annotated[float, Field(ge=0)] = 0.0
    """Between hosts: bytes that a message in transit keeps in the queue of its link. Before another
    message starts, its receiver's ready message waits behind these bytes of its own host."""


class Cpu(Config):
    """CPU costs of communication; all zeros where the network hardware does the work."""

    pool: Literal["host", "shared"] = "host"
    """``"host"``: each host has its own cores; ``"shared"``: all share one machine's (the lab)."""
    cores: Annotated[float, Field(gt=0)] = 1.0
    """Cores of each pool that communication may use."""
    s_per_byte_between: Annotated[float, Field(ge=0)] = 0.0
    """Core-seconds per byte between hosts, half of them at either end."""
    s_per_byte_inside: Annotated[float, Field(ge=0)] = 0.0
    """Core-seconds per byte inside a host, half of them at either end."""
    s_per_message: Annotated[float, Field(ge=0)] = 0.0
    """Core-seconds per message, half of them at either end."""
    s_per_byte_added: Annotated[float, Field(ge=0)] = 0.0
    """Core-seconds per received byte that is added to the local tensor."""


class Cluster(Config):
    """Hosts, ranks, links and cores. All messages of one rank share at most one core."""

    name: str = "unnamed"
    """Any name for the cluster."""
    ranks_per_host: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...],
        BeforeValidator(_parse_ranks_per_host),
        Field(min_length=1),
    ]
    """``"4x2"`` for four hosts of two ranks each, or a list with the ranks of each host."""
    between: LinkCosts
    """Costs of messages between hosts."""
    inside: LinkCosts
    """Costs of messages inside a host."""
    cpu: Cpu = Cpu()
    """CPU costs of messages."""
    native_latency_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that the back end's own all-reduce adds to the cost of its messages."""
    tables: Mapping[str, str] = Field(default_factory=dict)
    """Measured algorithms by message size, for shapes of hosts and ranks such as 2x4."""

    @property
    def mesh(self) -> Mesh:
        """Return the hosts and ranks as a mesh."""
        return Mesh(self.ranks_per_host)

    def with_mesh(self, mesh: Mesh) -> Self:
        """Return a cluster with the same links and cores, and the hosts and ranks of ``mesh``."""
        return self.model_copy(update={"ranks_per_host": mesh.ranks_per_host})

    def write(self, path: Path) -> None:
        """Write the cluster as TOML; `load_cluster` reads it back to an equal cluster."""
        write_atomically(path, self.to_toml())

    def to_toml(self) -> str:
        """Return the cluster as TOML, each value below a comment that explains it."""
        lines = [
            "# The cluster that stretto predicts for; units are seconds, bytes and core-seconds.",
            "",
        ]
        lines += _toml_lines(self)
        for name in ("between", "inside", "cpu"):
            lines += ["", f"[{name}]", *_toml_lines(getattr(self, name))]
        lines += ["", "[tables]"] if self.tables else []
        lines += [
            f"{toml_value(shape)} = {toml_value(self.tables[shape])}" for shape in self.tables
        ]
        return "\n".join(lines) + "\n"


def load_cluster(path: Path) -> Cluster:
    """Return the cluster described in ``path``.

    Raises:
        ConfigError: The file does not exist, or some of its values are wrong.
    """
    if not path.is_file():
        raise ConfigError(
            f"there is no cluster description {path}; measure one with `stretto calibrate`, or "
            "start from one of the presets"
        )
    return load(Cluster, path).config


def mesh_of(ranks: int, per_host: int) -> Mesh:
    """Return hosts of ``per_host`` ranks each; the last one has the remaining ranks.

    Raises:
        ConfigError: One of the numbers is below 1.
    """
    if ranks < 1 or per_host < 1:
        raise ConfigError(
            f"--ranks {ranks} --ranks-per-host {per_host}: expected at least 1 of each"
        )
    hosts, rest = divmod(ranks, per_host)
    return Mesh((per_host,) * hosts + ((rest,) if rest else ()))


def _toml_lines(table: Config) -> list[str]:
    """Return the TOML lines of a table's plain settings, each below its help."""
    lines: list[str] = []
    for key, field in type(table).model_fields.items():
        value = getattr(table, key)
        if isinstance(value, Config | Mapping):
            continue
        if key == "ranks_per_host":
            is_even = len(set(value)) == 1
            value = f"{len(value)}x{value[0]}" if is_even else list(value)
        lines += [
            f"# {' '.join((field.description or '').split())}",
            f"{key} = {toml_value(value)}",
        ]
    return lines


# --- presets ---

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
        between=LinkCosts(latency_s=50e-6, bytes_per_s=1.18e9),  # 10 Gbit/s less 6 % headers
        inside=LinkCosts(latency_s=30e-6, bytes_per_s=2e9),
        cpu=_TCP,
        native_latency_s=1e-3,
    ),
    "box 400mbit": Cluster(
        name="box 400mbit",
        ranks_per_host=(1,) * 4,
        between=LinkCosts(latency_s=100e-6, bytes_per_s=47.5e6),  # a token bucket gives TCP 95 %
        inside=LinkCosts(latency_s=60e-6, bytes_per_s=1.5e9),
        cpu=_TCP.model_copy(update={"pool": "shared", "cores": 2.0}),
        native_latency_s=5e-3,
    ),
    "gpu nodes 100gbit": Cluster(
        name="gpu nodes 100gbit",
        ranks_per_host=(8,) * 8,
        between=LinkCosts(latency_s=10e-6, bytes_per_s=12.5e9),
        inside=LinkCosts(latency_s=3e-6, bytes_per_s=150e9),
    ),
}


def preset(name: str) -> Cluster:
    """Return the preset ``name``.

    Raises:
        ConfigError: There is no such preset; the message suggests the nearest name.
    """
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    raise ConfigError(f"no cluster is called {name!r}{hint} known: {', '.join(PRESETS)}")
