"""Lower strategies to step programs: one function for each kind, in the table `LOWERINGS`.

A lowering is pure. It reads the settings, the model's parameters and the mesh, and returns the
blocks and operations of a step; see `stretto.program.step_program`. Settings that are left open
("auto") are chosen here as a run chooses them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from stretto.cluster.world import Mesh
from stretto.collectives.algorithm_table import parse_table
from stretto.collectives.algorithms import doubling, ring_all_gather
from stretto.collectives.codecs import WIRE_DTYPES, parse_wire
from stretto.collectives.schedule import Schedule
from stretto.comm.topk_all_reduce import num_kept
from stretto.config import Config
from stretto.errors import ConfigError
from stretto.program.blocks import NamedParameter, cut_fragments, parameters_in_backward_order
from stretto.program.lowering import (
    SAMPLE_COUNT,
    ProgramInputs,
    block_of,
    every_step,
    world_sum,
)
from stretto.program.step_program import (
    ALL,
    Group,
    Kind,
    Mixing,
    Moment,
    Operation,
    PairCall,
    ParameterBlock,
    Payload,
    PeerRound,
    Phase,
    Source,
    StepProgram,
    Updates,
)
from stretto.strategies.adpsgd import ADPSGDConfig
from stretto.strategies.adpsgd_averaging import PAIR_LANE
from stretto.strategies.allreduce import AllReduceConfig, resolve_bucket_lengths, tune_config
from stretto.strategies.gossip.config import GossipConfig
from stretto.strategies.gossip.gossip_program import gossip_program
from stretto.strategies.local_fragments import new_flat_buffer, shift_lanes
from stretto.strategies.local_updates_config import (
    AveragedConfig,
    LocalConfig,
    NoLoCoConfig,
    PostLocalConfig,
)
from stretto.strategies.sharded.config import ShardedConfig
from stretto.strategies.sharded.plan_program import sharded_program

_END, _WHOLE_UPDATE = Moment(Phase.END), Moment(Phase.UPDATE)


def lower(config: Config, inputs: ProgramInputs) -> StepProgram:
    """Return the step program of a strategy's settings.

    Raises:
        ConfigError: The settings do not fit the model or the mesh, or no lowering reads one.
    """
    for kind, lowering in LOWERINGS:
        if isinstance(config, kind):
            _refuse_unread_settings(config)
            return lowering(config, inputs)
    raise ConfigError(f"{type(config).__name__} has no step program")


def _refuse_unread_settings(config: Config) -> None:
    """Refuse settings of a kind that is not in `READ_SETTINGS`, which no lowering knows."""
    for name, field in type(config).model_fields.items():
        if name not in READ_SETTINGS and getattr(config, name) != field.default:
            value = getattr(config, name)
            raise ConfigError(f"strategy.{name} = {value!r}: no step program reads it")


# --- all-reduce ---


def allreduce_program(config: AllReduceConfig, inputs: ProgramInputs) -> StepProgram:
    """Return the program that sums gradients bucket by bucket during backward."""
    chosen = tune_config(config, inputs.mesh, inputs.model)
    named = parameters_in_backward_order(inputs.model)
    lengths = resolve_bucket_lengths(chosen, inputs.model)
    blocks: list[ParameterBlock] = []
    operations: list[Operation] = []
    for index, length in enumerate(lengths):
        bucket, named = named[:length], named[length:]
        blocks.append(block_of(bucket, len(lengths) - 1 - index))
        gate, due = Moment(Phase.GRADIENT, index), Moment(Phase.UPDATE, index)
        due = _WHOLE_UPDATE if inputs.reads_gradients else due
        if inputs.weighs_samples and not index:
            operations.append(world_sum(Source.SAMPLE, ALL, SAMPLE_COUNT, None, (gate, due)))
        for kind, source, payload, schedule in _bucket_messages(bucket, chosen, inputs.mesh):
            operation = world_sum(source, index, payload, schedule, (gate, due))
            operations.append(operation._replace(kind=kind))
    return StepProgram(
        chosen.kind,
        inputs.mesh,
        tuple(blocks),
        every_step(operations),
        Updates.WHOLE if inputs.reads_gradients else Updates.AFTER_BACKWARD,
    )


def _bucket_messages(
    bucket: Sequence[NamedParameter], config: AllReduceConfig, mesh: Mesh
) -> Iterator[tuple[Kind, Source, Payload, Schedule]]:
    """Yield the sums of one bucket: its gradients, and its has-gradient flags unless behind them.

    ``config`` has its algorithm chosen.
    """
    table, wire = parse_table(config.algorithm), parse_wire(config.wire)
    numels = [p.numel() for _, p in bucket]
    element_bytes = (wire.dtype or bucket[0][1].dtype).itemsize
    with_flags = Payload(sum(numels) + len(bucket), element_bytes)
    schedule = table.pick(with_flags.num_bytes).schedule(mesh)
    if wire.codec is None and wire.kept_fraction is None:
        yield Kind.ALL_REDUCE, Source.GRADIENT, with_flags, schedule
        return
    if wire.codec is not None:
        payload = Payload(sum(numels), element_bytes, wire.codec, tuple(numels))
        yield Kind.ALL_REDUCE, Source.GRADIENT, payload, schedule
    if wire.kept_fraction is not None:
        entries = 2 * num_kept(sum(numels), wire.kept_fraction)
        payload = Payload(mesh.size * entries, torch.int32.itemsize)
        yield Kind.ALL_GATHER, Source.GRADIENT, payload, ring_all_gather(mesh.size)
    flags = Payload(len(bucket), element_bytes)
    yield Kind.ALL_REDUCE, Source.SAMPLE, flags, doubling(mesh.size)


# --- local updates ---


def local_program(config: LocalConfig, inputs: ProgramInputs) -> StepProgram:
    """Return the program in which ranks step alone and synchronise fragments in rounds."""
    streaming, mesh = config.streaming(), inputs.mesh
    cut = cut_fragments(inputs.model, streaming.fragments)
    parameters = [[p for _, p in named] for _, named in cut]
    routes: list[Callable[[int], Schedule | PeerRound]] = []
    wire = None
    if isinstance(config, AveragedConfig):
        wire = WIRE_DTYPES[config.wire]
    buffers = [new_flat_buffer(part, wire) for part in parameters]
    payloads = [Payload(buffer.numel(), buffer.element_size()) for buffer in buffers]
    if isinstance(config, AveragedConfig):
        table = config.table(mesh, on_gpu=any(buffer.is_cuda for buffer in buffers))
        schedules = [shift_lanes(table.pick(p.num_bytes).schedule(mesh)) for p in payloads]
        routes = [partial(_same_schedule, schedule) for schedule in schedules]
    elif isinstance(config, NoLoCoConfig):
        routes = [_pair_rounds(config, mesh, turn) for turn, _ in cut]

    def operations(step: int, _requested: bool) -> tuple[Operation, ...]:
        turn = config.fragment_turn(step)
        due = Moment(Phase.END, later=streaming.delay)
        return tuple(
            _local_operation(index, payload, routes[index](step), due)
            for index, payload in enumerate(payloads)
            if cut[index][0] == turn
        )

    is_pairs = isinstance(config, NoLoCoConfig)
    before = config.from_step if isinstance(config, PostLocalConfig) else 0
    between = config.every // streaming.fragments
    remainders = tuple((turn + 1) * between % config.every for turn, _ in cut)
    group, source = (Group.PEERS, Source.PARAMETER) if is_pairs else (Group.WORLD, Source.CHANGE)
    return StepProgram(
        str(getattr(config, "kind", "")),
        mesh,
        tuple(block_of(named, index) for index, (_, named) in enumerate(cut)),
        operations,
        Updates.WHOLE,
        None,
        Mixing(group, source, config.every, remainders, streaming.delay),
        config.build_topology() if isinstance(config, NoLoCoConfig) else None,
        skips_alone=True,
        period=config.every,
        first_step=config.every * -(-before // config.every),
    )


def _same_schedule(schedule: Schedule, _step: int) -> Schedule:
    return schedule


def _pair_rounds(config: NoLoCoConfig, mesh: Mesh, turn: int) -> Callable[[int], PeerRound]:
    topology = config.build_topology()
    return lambda step: PeerRound(topology, mesh.size, 1, step // config.every, turn)


def _local_operation(
    index: int, payload: Payload, route: Schedule | PeerRound, due: Moment
) -> Operation:
    if isinstance(route, PeerRound):
        return Operation(
            Kind.EXCHANGE,
            Source.PARAMETER,
            index,
            Group.PEERS,
            payload,
            route,
            _END,
            due,
            lane=0,
        )
    return world_sum(Source.CHANGE, index, payload, route, (_END, due))


# --- AD-PSGD ---


def adpsgd_program(config: ADPSGDConfig, inputs: ProgramInputs) -> StepProgram:
    """Return the program in which an active rank averages with a passive one during a step."""
    named = [(name, p) for name, p in inputs.model.named_parameters() if p.requires_grad]
    tensor_bytes = tuple(
        sum(p.nbytes for _, p in named if p.dtype == dtype)
        for dtype in dict.fromkeys(p.dtype for _, p in named)
    )

    def operations(step: int, _requested: bool) -> tuple[Operation, ...]:
        return (
            Operation(
                Kind.CALL,
                Source.PARAMETER,
                ALL,
                Group.PEERS,
                Payload(sum(tensor_bytes), 1),
                PairCall(config.peer_of, step, tensor_bytes),
                _END,
                Moment(Phase.END, later=1),
                PAIR_LANE,
            ),
        )

    return StepProgram(
        config.kind,
        inputs.mesh,
        (block_of(named, 0),),
        operations,
        Updates.WHOLE,
        None,
        skips_alone=True,
    )


LOWERINGS: Sequence[tuple[type, Callable[..., StepProgram]]] = (
    (AllReduceConfig, allreduce_program),
    (GossipConfig, gossip_program),
    (LocalConfig, local_program),
    (ADPSGDConfig, adpsgd_program),
    (ShardedConfig, sharded_program),
)
"""The lowering of each type of settings."""

READ_SETTINGS = {
    "kind",
    *("algorithm", "cluster", "bucket_bytes", "bucket_lengths", "wire"),
    *("plan", "memory", "profile", "device", "prefetch", "reduce_slots", "unit", "block"),
    *("checkpoint", "in_host", "parameters"),
    *("topology", "peers", "segments", "delay", "every", "seed", "lanes", "groups", "mix"),
    *("exact_every", "consensus_every", "consensus_sample", "consensus_limit"),
    *("from_step", "fragments"),
    *("reset_momentum", "alpha", "beta", "outer_lr", "outer_momentum"),
}
"""Settings that lowerings read, or that change no message: those of the outer optimizers."""
