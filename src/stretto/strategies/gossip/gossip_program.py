"""Lower gossip to a step program: a round of peers for each segment, sums and gathers in groups."""

import math
from collections.abc import Iterator, Sequence

import torch

from stretto.collectives.algorithms.ring import ring_in_groups
from stretto.collectives.codecs import WIRE_DTYPES
from stretto.program.blocks import NamedParameter, cut_segments
from stretto.program.lowering import ProgramInputs, block_of, world_sum
from stretto.program.step_program import (
    ALL,
    Group,
    GroupGather,
    Kind,
    Mixing,
    Moment,
    Operation,
    Payload,
    PeerRound,
    Phase,
    Source,
    StepProgram,
    Updates,
    WhenSkipped,
)
from stretto.simulator.algorithm_choice import default_table
from stretto.strategies.gossip.coded_wire import CODECS
from stretto.strategies.gossip.config import GossipConfig
from stretto.strategies.gossip.consensus import sample_coordinates
from stretto.strategies.gossip.groups import group_of

_END, _WHOLE_UPDATE = Moment(Phase.END), Moment(Phase.UPDATE)


def gossip_program(config: GossipConfig, inputs: ProgramInputs) -> StepProgram:
    """Return the program that exchanges each segment with the peers of a round."""
    cut = cut_segments(inputs.model, config.segments)[::-1]
    lowering = _GossipLowering(config, inputs, cut)
    group = lowering.group
    mixes_gradients = config.mixes_gradients
    gradients = Group.INSIDE if group.width > 1 else None
    mixing = None
    if group.count > 1:
        source = Source.GRADIENT if mixes_gradients else Source.PARAMETER
        replaced_every = None if mixes_gradients else config.exact_every
        late_steps = config.delay * config.every
        mixing = Mixing(Group.PEERS, source, config.every, (), late_steps, replaced_every)
        if mixes_gradients and config.every == 1:
            gradients = Group.PEERS
    is_whole = mixes_gradients or inputs.reads_gradients
    periods = (config.every, config.exact_every or 1, config.consensus_every or 1)
    return StepProgram(
        str(getattr(config, "kind", "")),
        inputs.mesh,
        tuple(block_of(segment, len(cut) - 1 - index) for index, segment in enumerate(cut)),
        lowering.operations,
        Updates.WHOLE if is_whole else lowering.updates,
        gradients,
        mixing,
        config.build_topology(),
        group.width,
        skips_alone=group.width == 1 and not mixes_gradients,
        period=math.lcm(*periods),
        first_step=config.every - 1,
    )


class _GossipLowering:
    """The operations of gossip in any step; segments count from the last layers."""

    def __init__(
        self, config: GossipConfig, inputs: ProgramInputs, cut: Sequence[Sequence[NamedParameter]]
    ) -> None:
        self._config, self._inputs, self._cut = config, inputs, cut
        self._topology = config.build_topology()
        self.group = group_of(0, inputs.mesh, config.groups, self._topology)
        self._lanes = min(config.lanes, len(cut))
        self._is_whole = config.mixes_gradients or inputs.reads_gradients

    @property
    def updates(self) -> Updates:
        """Return when segments are updated, unless all are updated at once."""
        return Updates.ON_ARRIVAL if self.group.width > 1 else Updates.IN_BACKWARD

    def operations(self, step: int, average_requested: bool) -> tuple[Operation, ...]:
        """Return the operations that leave in ``step``."""
        config = self._config
        averages = average_requested or config.averages_exactly_after(step)
        found: list[Operation] = []
        for index in range(len(self._cut)):
            found += self._segment_operations(step, index, len(found), averages=averages)
        if config.measures_in(step):
            found.append(self._measurement())
        if averages:
            found += self._exact_averages()
        return tuple(found)

    def _segment_operations(
        self, step: int, index: int, first: int, *, averages: bool
    ) -> Iterator[Operation]:
        config, group = self._config, self.group
        after = None
        if group.width > 1:
            after = first
            yield self._group_sum(index)
        replaced = averages and not config.mixes_gradients
        if group.count == 1 or replaced or (step + 1) % config.every:
            return
        gate, due = self._window(index)
        exchange = Operation(
            Kind.EXCHANGE,
            Source.GRADIENT if config.mixes_gradients else Source.PARAMETER,
            index,
            Group.PEERS,
            self._payload(index),
            self._round(step, index),
            gate,
            due,
            1 + index % self._lanes,
            queue=1,
            after=after,
            when_skipped=self._when_skipped,
        )
        yield exchange
        if group.width > 1:
            yield self._group_gather(exchange, first + 1)

    @property
    def _when_skipped(self) -> WhenSkipped:
        """Ranks that share a model skip together and send nothing, unless after the update."""
        together = self.group.width > 1 or self._config.mixes_gradients
        is_late = self._inputs.reads_gradients and not self._config.mixes_gradients
        return WhenSkipped.SKIP if together and not is_late else WhenSkipped.TRAVEL

    def _window(self, index: int) -> tuple[Moment, Moment]:
        config = self._config
        if config.mixes_gradients:
            return Moment(Phase.GRADIENT, index), _WHOLE_UPDATE
        gate = Moment(Phase.UPDATED) if self._is_whole else Moment(Phase.UPDATED, index)
        if self.updates is Updates.ON_ARRIVAL and not self._is_whole:
            gate = Moment(Phase.GRADIENT, index)
        if config.delay:
            return gate, gate._replace(later=config.delay * config.every)
        calls = self._inputs.calls or ()
        names = [name for name, _ in self._cut[index]]
        has_hook = all(name.rpartition(".")[0] in calls for name in names)
        return gate, Moment(Phase.FORWARD, index) if has_hook else _END

    def _round(self, step: int, index: int) -> PeerRound:
        segment = len(self._cut) - 1 - index
        number = step // self._config.every
        return PeerRound(self._topology, self.group.count, self.group.width, number, segment)

    def _payload(self, index: int) -> Payload:
        config, segment = self._config, self._cut[index]
        numel = sum(p.numel() for _, p in segment)
        if config.wire in CODECS:
            return Payload(numel, 1, CODECS[config.wire])
        element_bytes = (WIRE_DTYPES[config.wire] or segment[0][1].dtype).itemsize
        extra = len(segment) if config.mixes_gradients else int(config.is_push_sum)
        return Payload(numel + extra, element_bytes)

    def _group_sum(self, index: int) -> Operation:
        segment, size = self._cut[index], self._inputs.mesh.size
        payload = Payload(
            sum(p.numel() for _, p in segment) + len(segment), segment[0][1].element_size()
        )
        is_late = self._is_whole and not self._config.mixes_gradients
        due = _WHOLE_UPDATE if is_late else Moment(Phase.GRADIENT)
        schedule = ring_in_groups(size, self.group.width, 1 + self._lanes)
        operation = world_sum(
            Source.GRADIENT, index, payload, schedule, (Moment(Phase.GRADIENT, index), due)
        )
        return operation._replace(group=Group.INSIDE)

    def _group_gather(self, exchange: Operation, after: int) -> Operation:
        """Return the gather of a round's change in the group, in the parameters' own type."""
        segment = self._cut[exchange.block]
        config = self._config
        extra = len(segment) if config.mixes_gradients else int(config.is_push_sum)
        numel = sum(p.numel() for _, p in segment) + extra
        assert isinstance(exchange.route, PeerRound)
        return exchange._replace(
            kind=Kind.ALL_GATHER,
            source=Source.CHANGE,
            group=Group.INSIDE,
            payload=Payload(numel, segment[0][1].element_size()),
            route=GroupGather(exchange.route),
            after=after,
        )

    def _measurement(self) -> Operation:
        sizes = [sum(p.numel() for _, p in segment) for segment in self._cut]
        sample = sample_coordinates(sizes, self._config.consensus_sample)
        payload = Payload(len(sample.weights) + 2, torch.float64.itemsize)
        due = Moment(Phase.BACKWARD, later=1)
        return world_sum(Source.SAMPLE, ALL, payload, None, (_END, due))._replace(queue=2)

    def _exact_averages(self) -> Iterator[Operation]:
        """Yield the averages of all models, one for each type of parameters."""
        parameters = [p for segment in self._cut for _, p in segment]
        mesh = self._inputs.mesh
        choose = self._inputs.choose_table
        table = choose() if choose else default_table(mesh, on_gpu=parameters[0].is_cuda)
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            numel = sum(p.numel() for p in parameters if p.dtype == dtype)
            payload = Payload(numel, torch.promote_types(dtype, torch.float32).itemsize)
            schedule = table.pick(payload.num_bytes).schedule(mesh)
            operation = world_sum(Source.PARAMETER, ALL, payload, schedule, (_END, _END))
            yield operation._replace(queue=2, clears=True)
