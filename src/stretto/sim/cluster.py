"""A cluster as numbers: who is where, what a message costs on the way, what it costs the CPU.

Written by `stretto calibrate`, or by hand; read by everything that predicts.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field

from stretto.cluster.world import Mesh
from stretto.config import Config, load
from stretto.config.text import toml_value
from stretto.errors import ConfigError
from stretto.telemetry.aside import write_aside

_EVEN = re.compile(r"\s*([0-9]+)\s*x\s*([0-9]+)\s*")
_MOST_RANKS = 1_000_000


def _hosts(value: object) -> object:
    """Unfold ``"4x2"``, four hosts of two ranks; a list is one with the ranks of each host."""
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    match = _EVEN.fullmatch(value)
    hosts, ranks = (int(group) for group in match.groups()) if match else (0, 0)
    if not 0 < hosts * ranks <= _MOST_RANKS:
        raise ValueError(
            f'expected hosts x ranks such as "4x2", at most {_MOST_RANKS:,} ranks, or a list '
            f"with the ranks of each host, got {value!r}"
        )
    return (ranks,) * hosts


class Transport(Config):
    """What carries a message, as a line: so much for any message, so much for each byte."""

    latency_s: Annotated[float, Field(ge=0)]
    """Before the first byte arrives, once both ends are there."""
    bytes_per_s: Annotated[float, Field(gt=0)]
    """Between hosts, of each host's link in either direction, shared by its ranks; inside a host,
    what a single message can reach."""
    buffered_bytes: Annotated[float, Field(ge=0)] = 0.0
    """The end of a message that the sender has only to hand over: it goes on while that is still
    on its way. What the kernel's socket takes; 0 where sender and receiver end together."""
    queued_bytes: Annotated[float, Field(ge=0)] = 0.0
    """Between hosts, what a message under way has standing in its link's queue: before another
    begins, the word that its receiver is ready passes behind all that the receiver's host sends."""


class Cpu(Config):
    """What communication costs the cores; zeros where somebody else does the work."""

    pool: Literal["host", "shared"] = "host"
    """Whether each host has cores of its own, or all share one machine's (the lab)."""
    cores: Annotated[float, Field(gt=0)] = 1.0
    """Cores of a pool that communication may use."""
    s_per_byte_between: Annotated[float, Field(ge=0)] = 0.0
    """Core-seconds for each byte between hosts, half of them at either end."""
    s_per_byte_inside: Annotated[float, Field(ge=0)] = 0.0
    """Core-seconds for each byte inside a host, half of them at either end."""
    s_per_message: Annotated[float, Field(ge=0)] = 0.0
    """Core-seconds for any message, half of them at either end."""
    s_per_byte_added: Annotated[float, Field(ge=0)] = 0.0
    """Core-seconds to add what arrived to what is held."""


class Cluster(Config):
    """Hosts, ranks, links and cores; a rank's messages get at most one core between them."""

    name: str = "unnamed"
    """What people call it."""
    ranks_per_host: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_hosts), Field(min_length=1)
    ]
    """``"4x2"`` for four hosts of two ranks each, or a list with the ranks of each host."""
    between: Transport
    """Messages between hosts."""
    inside: Transport
    """Messages inside a host."""
    cpu: Cpu = Cpu()
    """What they cost the cores."""
    native_latency_s: Annotated[float, Field(ge=0)] = 0.0
    """What the back end's own all-reduce costs on top of its messages, however small."""
    tables: Mapping[str, str] = Field(default_factory=dict)
    """Algorithms by message size that were measured, for shapes of hosts and ranks such as 2x4."""

    @property
    def mesh(self) -> Mesh:
        """Return hosts and ranks as the algorithms take them."""
        return Mesh(self.ranks_per_host)

    def with_mesh(self, mesh: Mesh) -> Self:
        """Return the same links and cores under another shape."""
        return self.model_copy(update={"ranks_per_host": mesh.ranks_per_host})

    def write(self, path: Path) -> None:
        """Write it as TOML, which `load_cluster` reads back to an equal cluster."""
        write_aside(path, self.to_toml())

    def to_toml(self) -> str:
        """Return it as TOML, each value under the words that explain it."""
        lines = [
            "# A cluster as stretto sees it when it predicts; seconds, bytes, core-seconds.",
            "",
        ]
        lines += _settings(self)
        for name in ("between", "inside", "cpu"):
            lines += ["", f"[{name}]", *_settings(getattr(self, name))]
        lines += ["", "[tables]"] if self.tables else []
        lines += [
            f"{toml_value(shape)} = {toml_value(self.tables[shape])}" for shape in self.tables
        ]
        return "\n".join(lines) + "\n"


def load_cluster(path: Path) -> Cluster:
    """Return the cluster described in ``path``; raise `ConfigError` listing what is wrong."""
    if not path.is_file():
        raise ConfigError(
            f"there is no cluster description {path}; measure one with `stretto calibrate`, or "
            "start from one of the named clusters"
        )
    return load(Cluster, path).config


def mesh_of(ranks: int, per_host: int) -> Mesh:
    """Return hosts of so many ranks each; the last one has what is left.

    Raises:
        ConfigError: There are none.
    """
    if ranks < 1 or per_host < 1:
        raise ConfigError(
            f"--ranks {ranks} --ranks-per-host {per_host}: expected at least 1 of each"
        )
    hosts, rest = divmod(ranks, per_host)
    return Mesh((per_host,) * hosts + ((rest,) if rest else ()))


def _settings(table: Config) -> list[str]:
    """Return a table's own settings, each below its help."""
    lines: list[str] = []
    for key, field in type(table).model_fields.items():
        value = getattr(table, key)
        if isinstance(value, Config | Mapping):
            continue
        if key == "ranks_per_host":
            even = len(set(value)) == 1
            value = f"{len(value)}x{value[0]}" if even else list(value)
        lines += [
            f"# {' '.join((field.description or '').split())}",
            f"{key} = {toml_value(value)}",
        ]
    return lines
