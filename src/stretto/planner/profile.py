"""Profiles: the seconds and bytes of each unit of a model, and the costs of the link."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import AliasChoices, Field

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import ALL_GATHER, HOST_ALL_GATHER, REDUCE_SCATTER
from stretto.collectives.schedule import Schedule
from stretto.planner.plan import (
    ElementBytes,
    FrozenModel,
    MessageKind,
    Plan,
    PlanMessage,
    Sharding,
    Unit,
    VersionedModel,
    read_versioned,
)
from stretto.planner.presets import UnitShape
from stretto.renamed import PROFILE_KEYS
from stretto.simulator.cluster import PRESETS, Cluster, load_cluster, preset
from stretto.simulator.price import price

PROFILE_SCHEMA = 1


class UnitCost(FrozenModel):
    """The costs of one unit on one rank."""

    name: str
    numel: int = Field(ge=1)
    """Trainable elements."""
    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    spread: float = Field(default=0.0, ge=0)
    """Spread of forward and backward time over repeated steps, as a share of that time."""
    activation_bytes: int = Field(default=0, ge=0)
    """Activations kept from forward to backward."""
    input_bytes: int = Field(default=0, ge=0)
    """Inputs kept instead of the activations if backward recomputes those."""
    workspace_bytes: int = Field(default=0, ge=0)
    """Temporary memory needed while the unit runs."""
    tensors: tuple[int, ...] = ()
    """Elements of each of its parameters; if empty, the unit counts as one tensor."""
    used_often: bool = False
    """As in a plan: it may not be resharded after its own forward."""

    @property
    def shape(self) -> UnitShape:
        """The properties that presets need."""
        return UnitShape(self.name, self.numel, self.used_often)

    def scaled(self, factor: float) -> "UnitCost":
        """Return a copy whose times are multiplied by ``factor``."""
        seconds = {"forward_s": self.forward_s * factor, "backward_s": self.backward_s * factor}
        return self.model_copy(update=seconds)

    def with_allocator_overhead(self, share: float) -> "UnitCost":
        """Return a copy whose bytes are multiplied by ``1 + share``."""
        fields = ("activation_bytes", "input_bytes", "workspace_bytes")
        return self.model_copy(
            update={name: math.ceil(getattr(self, name) * (1 + share)) for name in fields}
        )


class Link(FrozenModel):
    """The link that the messages of all ranks share."""

    ranks: int = Field(ge=1)
    latency_s: float = Field(default=0.0, ge=0)
    """Latency of one message."""
    bytes_per_s: float = Field(gt=0)
    """Bandwidth of each rank in each direction; of each host if hosts have several ranks."""
    lanes: int = Field(default=1, ge=1)
    """Messages that may be sent at the same time; they share the bandwidth."""
    lane_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the bandwidth that one lane reaches while all others are idle."""
    gather_ratio: float = Field(default=1.0, gt=0)
    """Time of an all-gather, as a multiple of a reduce-scatter of as many bytes."""
    sum_ratio: float = Field(default=1.0, gt=0)
    """Time of an all-reduce, as a multiple of a reduce-scatter plus an all-gather."""
    copies: bool = False
    """Whether each lane needs a receive buffer of one rank's chunk until the chunk is added."""
    hosts: int = Field(default=1, ge=1)
    """Hosts, each with as many ranks. The next fields apply if several hosts have several ranks."""
    inner_latency_s: float = Field(default=0.0, ge=0)
    inner_bytes_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth inside a host; None: messages inside a host take no time."""

    @property
    def per_host(self) -> int:
        """The number of ranks on each host."""
        return self.ranks // self.hosts

    @property
    def is_hierarchical(self) -> bool:
        """Whether there are several hosts with several ranks each."""
        return self.hosts > 1 and self.per_host > 1

    def all_ranks_s(self, num_bytes: float) -> float:
        """Return the seconds of a reduce-scatter or all-gather of ``num_bytes`` on all ranks."""
        if self.ranks == 1:
            return 0.0
        if not self.is_hierarchical:
            return self.latency_s + num_bytes * (self.ranks - 1) / self.ranks / self.bytes_per_s
        outside = num_bytes * (self.hosts - 1) / self.hosts / self.bytes_per_s
        return self.latency_s + outside + self.in_host_s(num_bytes / self.hosts)

    def in_host_s(self, num_bytes: float) -> float:
        """Return the seconds of the same collective among the ranks of one host."""
        if self.inner_bytes_per_s is None or self.per_host == 1:
            return 0.0
        share = (self.per_host - 1) / self.per_host
        return self.inner_latency_s + num_bytes * share / self.inner_bytes_per_s

    def scaled(self, factor: float) -> "Link":
        """Return a link on which every message takes ``factor`` times as long."""
        inner = self.inner_bytes_per_s
        return self.model_copy(
            update={
                "latency_s": self.latency_s * factor,
                "bytes_per_s": self.bytes_per_s / factor,
                "inner_latency_s": self.inner_latency_s * factor,
                "inner_bytes_per_s": None if inner is None else inner / factor,
            }
        )


def _named(key: str, default: float, **limits: Any) -> Any:  # noqa: ANN401 - as `Field` has it
    """Return a field that a file has under ``key`` or under its old name."""
    names = AliasChoices(key, *(old for old, new in PROFILE_KEYS.items() if new == key))
    return Field(default, validation_alias=names, **limits)


class Profile(VersionedModel):
    """The costs of a model's units and of the link of a cluster."""

    units: tuple[UnitCost, ...]
    link: Link
    parameter_bytes: int = 4
    """Bytes of one parameter element in unshard messages."""
    gradient_bytes: int = 4
    """Bytes of one gradient element in reduce messages."""
    kept_bytes: int = 4
    """Bytes of one element of the copy that the optimizer updates."""
    state_bytes: int = 0
    """Bytes of optimizer state per element."""
    update_s: float = Field(default=0.0, ge=0)
    """Update time of the whole model, if the update waits for all gradients."""
    slowdown: float = Field(default=1.0, ge=1)
    """Factor on the compute time while a message is being sent."""
    no_barrier_slowdown: float = _named("no_barrier_slowdown", 1.0, gt=0)
    """Factor on all times if no barrier keeps the ranks together."""
    reordering_slowdown: float = _named("reordering_slowdown", 1.0, gt=0)
    """Additional factor for plans without a barrier whose messages leave the order of use."""
    reordering_slowdown_with_barrier: float = _named("reordering_slowdown_with_barrier", 1.0, gt=0)
    """The same factor for plans with a barrier."""
    other_bytes: int = Field(default=0, ge=0)
    """Bytes of everything else: buffers, frozen parameters, the batch."""
    allocator_overhead: float = _named("allocator_overhead", 0.0, ge=0)
    """Allocator overhead of model states and messages, as a share of their bytes.
    The overhead of everything else is included in its bytes."""
    source: str = ""
    """Where the figures come from."""
    unit_bytes: int | None = Field(default=None, ge=0)
    """Small neighbouring modules were joined into units up to this size; None if unknown."""
    schema_version: int = PROFILE_SCHEMA

    @property
    def shapes(self) -> list[UnitShape]:
        """The properties of the units that presets need."""
        return [unit.shape for unit in self.units]

    @property
    def element_bytes(self) -> ElementBytes:
        """Bytes of one element in each of its forms."""
        return ElementBytes(
            self.parameter_bytes, self.gradient_bytes, self.kept_bytes, self.state_bytes
        )

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward of all units."""
        return sum(unit.forward_s + unit.backward_s for unit in self.units)

    def message_s(self, plan: Plan, message: PlanMessage) -> float:
        """Return the seconds that the link is busy with ``message``."""
        unit = plan.units[message.unit]
        return self.transfer_s(unit, message.what, unit.blocks[message.block])

    def transfer_s(self, unit: Unit, what: MessageKind, numel: int) -> float:
        """Return the seconds that the link is busy with ``numel`` elements of ``unit``."""
        reduces = what is MessageKind.REDUCE
        num_bytes = numel * (self.gradient_bytes if reduces else self.parameter_bytes)
        repeats = 1.0 if reduces else self.link.gather_ratio
        if unit.in_host and self.link.is_hierarchical:
            in_host_s = repeats * self.link.in_host_s(num_bytes)
            # Each rank all-reduces its chunk with the ranks that own it on the other hosts.
            hosts = self.link.hosts
            outside = 2 * num_bytes * (hosts - 1) / hosts / self.link.bytes_per_s
            return in_host_s + (self.link.latency_s + outside) * reduces
        # An all-reduce is a reduce-scatter and an all-gather in one message.
        if unit.sharding is Sharding.DP:
            repeats = (repeats + self.link.gather_ratio) * self.link.sum_ratio
        return repeats * self.link.all_ranks_s(num_bytes)

    def link_s(self, plan: Plan) -> float:
        """Return the seconds that the link is busy in one step."""
        return sum(self.message_s(plan, message) for message in plan.messages)

    def slot_seconds(self, checkpoints: Sequence[bool], *, barrier: bool) -> list[float]:
        """Return the seconds of each slot; ``checkpoints`` says which units recompute."""
        unit_checkpoints = zip(self.units, checkpoints, strict=True)
        backward = [
            unit.backward_s + unit.forward_s * recompute for unit, recompute in unit_checkpoints
        ]
        forward = [unit.forward_s for unit in self.units]
        return [*reversed(backward), self.update_s if barrier else 0.0, *forward]

    def with_allocator_overhead(self, share: float, fixed_bytes: int) -> "Profile":
        """Return the profile with allocator overhead: a share of all bytes, plus a constant.

        Memory limits then apply to what the allocator reserves, not to what it hands out.
        """
        return self.model_copy(
            update={
                "units": tuple(unit.with_allocator_overhead(share) for unit in self.units),
                "other_bytes": math.ceil(self.other_bytes * (1 + share)) + fixed_bytes,
                "allocator_overhead": share,
            }
        )

    @property
    def has_rank_skew(self) -> bool:
        """Whether the ranks were measured to lose time by drifting apart."""
        return (
            max(
                self.no_barrier_slowdown,
                self.reordering_slowdown,
                self.reordering_slowdown_with_barrier,
            )
            > 1.0
        )

    def adjusted_for(self, plan: Plan) -> "Profile":
        """Return the profile scaled for ``plan``, by its barrier and the order of its messages."""
        factor, reordering = self.no_barrier_slowdown, self.reordering_slowdown
        if plan.barrier:
            factor, reordering = 1.0, self.reordering_slowdown_with_barrier
        return self.scaled(factor * (reordering if plan.is_reordered else 1.0))

    def scaled(self, factor: float) -> "Profile":
        """Return the profile with all times multiplied by ``factor``, for every plan."""
        unscaled = {
            "no_barrier_slowdown": 1.0,
            "reordering_slowdown": 1.0,
            "reordering_slowdown_with_barrier": 1.0,
        }
        if factor == 1.0:
            return self.model_copy(update=unscaled)
        units = tuple(unit.scaled(factor) for unit in self.units)
        changes = {"units": units, "link": self.link.scaled(factor)}
        return self.model_copy(update={**unscaled, **changes, "update_s": self.update_s * factor})


def read_profile(path: Path) -> Profile:
    """Read a profile file.

    Raises:
        ConfigError: The file cannot be read, or does not hold a profile.
    """
    return read_versioned(path, Profile, "profile", PROFILE_SCHEMA)


# --- links: from a cluster description, or from measured message costs ---

_PRICED_CHUNK_BYTES = 4_000, 4_000_000
"""Bytes of a chunk in a message dominated by latency, and in one dominated by bandwidth."""
_RATE_SHARE = 0.9
_MIN_UNIT_BYTES, _MAX_UNIT_BYTES = 1_000_000, 500_000_000


class LatencyBandwidth(NamedTuple):
    """A linear message cost: seconds per message, and seconds per byte of its tensor."""

    latency_s: float
    s_per_byte: float


def load_cluster_or_preset(name_or_path: str) -> Cluster:
    """Return a cluster preset by name, or the cluster of a file that `stretto calibrate` wrote.

    Raises:
        ConfigError: There is no such preset or file.
    """
    return (
        preset(name_or_path)
        if name_or_path in PRESETS or "." not in name_or_path
        else load_cluster(Path(name_or_path))
    )


def link_from_cluster(cluster: Cluster, mesh: Mesh | None = None, *, lanes: int = 1) -> Link:
    """Return the link of a sharded run on ``cluster``, or on ``cluster`` with another ``mesh``.

    Collectives are priced as the run executes them: as a ring of n - 1 messages one after another,
    or hierarchically, inside and between hosts, if hosts have several ranks, as many on each.
    """
    target_cluster = cluster if mesh is None else cluster.with_mesh(mesh)
    hierarchical = is_hierarchical(target_cluster.mesh)
    name = "hierarchical" if hierarchical else "ring"
    schedules = (table[name](target_cluster.mesh, 1) for table in (REDUCE_SCATTER, ALL_GATHER))
    across = _mean_cost(*(_fit_schedule_price(schedule, target_cluster) for schedule in schedules))
    inside = (
        _fit_schedule_price(HOST_ALL_GATHER["ring"](target_cluster.mesh, 1), target_cluster)
        if hierarchical
        else None
    )
    return link_from_costs(target_cluster.mesh, across, inside, lanes=lanes)


def is_hierarchical(mesh: Mesh) -> bool:
    """Return whether there are several hosts with several ranks, as many on each."""
    return (
        mesh.hosts > 1 and set(mesh.ranks_per_host) not in ({1}, set()) and _has_equal_hosts(mesh)
    )


def _has_equal_hosts(mesh: Mesh) -> bool:
    return len(set(mesh.ranks_per_host)) == 1


def _fit_schedule_price(schedule: Schedule, cluster: Cluster) -> LatencyBandwidth:
    """Return the linear cost through the prices of a short and of a long tensor."""
    short, long = (chunk * cluster.mesh.size for chunk in _PRICED_CHUNK_BYTES)
    short_s, long_s = (price(schedule, size, cluster).seconds for size in (short, long))
    s_per_byte = (long_s - short_s) / (long - short)
    return LatencyBandwidth(max(0.0, short_s - s_per_byte * short), s_per_byte)


def _mean_cost(one: LatencyBandwidth, other: LatencyBandwidth) -> LatencyBandwidth:
    latency_s, s_per_byte = ((a + b) / 2 for a, b in zip(one, other, strict=True))
    return LatencyBandwidth(latency_s, s_per_byte)


def link_from_costs(
    mesh: Mesh, across: LatencyBandwidth, inside: LatencyBandwidth | None = None, *, lanes: int = 1
) -> Link:
    """Return the link whose messages have these costs.

    ``across`` is the cost of a reduce-scatter or all-gather over all ranks, ``inside`` that of an
    all-gather inside a host. ``inside`` is used only if `is_hierarchical`.
    """
    if mesh.size == 1:
        return Link(ranks=1, bytes_per_s=1 / across.s_per_byte if across.s_per_byte else 1.0)
    if inside is None or not is_hierarchical(mesh):
        share = (mesh.size - 1) / mesh.size
        hosts = mesh.hosts if _has_equal_hosts(mesh) and not is_hierarchical(mesh) else 1
        return Link(
            ranks=mesh.size,
            latency_s=across.latency_s,
            bytes_per_s=share / across.s_per_byte,
            lanes=lanes,
            hosts=hosts,
        )
    hosts, ranks_per_host = mesh.hosts, mesh.ranks_per_host[0]
    # The cost between hosts is the whole cost less the part inside hosts.
    between_s = max(across.s_per_byte - inside.s_per_byte / hosts, across.s_per_byte / 100)
    return Link(
        ranks=mesh.size,
        latency_s=max(0.0, across.latency_s - inside.latency_s),
        bytes_per_s=(hosts - 1) / hosts / between_s,
        lanes=lanes,
        hosts=hosts,
        inner_latency_s=inside.latency_s,
        inner_bytes_per_s=(ranks_per_host - 1) / ranks_per_host / inside.s_per_byte,
    )


def worthwhile_unit_bytes(link: Link) -> int:
    """Return the bytes up to which small neighbouring modules are worth joining into one unit.

    A message of that size reaches nine tenths of the bandwidth. It is between 1 MB and 500 MB.
    """
    unit_bytes = _RATE_SHARE / (1 - _RATE_SHARE) * link.latency_s * link.bytes_per_s
    return round(min(max(unit_bytes, _MIN_UNIT_BYTES), _MAX_UNIT_BYTES))
