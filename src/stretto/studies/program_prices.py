"""Price a step program: its operations as exchanges on the compute timeline of a rank.

Moments become seconds of computation since backward began (`_MomentSeconds`). Exchanges with peers
and sums in groups are simulated message by message, sums over all ranks as one message each. What
blocks all ranks at the end of a step, such as an exact average, is added to the period.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from stretto.collectives.algorithm_table import AlgorithmTable
from stretto.errors import ConfigError
from stretto.program.messages import lanes_of
from stretto.program.step_program import (
    ALL,
    Group,
    GroupGather,
    Kind,
    Moment,
    Operation,
    PairCall,
    PeerRound,
    Phase,
    Source,
    StepProgram,
    Updates,
)
from stretto.simulator.cluster import Cluster
from stretto.simulator.peer_exchanges import pattern_of_groups
from stretto.simulator.step_price import (
    AllReduceCosts,
    StepPrice,
    price_exchanges_by_all_reduce,
    price_pairwise_averaging,
    price_peer_exchanges,
)
from stretto.simulator.step_timeline import Exchange, StepTimeline
from stretto.studies.priced_run import ComputeTimeline
from stretto.train.step_consensus import LAG


@dataclass(frozen=True, slots=True)
class ProgramCosts:
    """What a program is priced with."""

    timeline: ComputeTimeline
    cluster: Cluster
    choose_table: Callable[[], AlgorithmTable]
    """Returns the algorithms of sums over all ranks; it may take long."""


def price_program(program: StepProgram, costs: ProgramCosts) -> StepPrice:
    """Return the price of a step of ``program``, as the mean over a period.

    Raises:
        ConfigError: The size of the messages depends on the gradients (sparse codecs).
    """
    period = _Period(program, costs.timeline)
    found = _price_exchanges(program, period, costs)
    return _add_blocking(found, period, costs)


class _Period:
    """The operations of a period: exchanges beside computation, and what blocks all ranks."""

    def __init__(self, program: StepProgram, timeline: ComputeTimeline) -> None:
        self._program, self._timeline = program, timeline
        self._seconds = _MomentSeconds(program, timeline)
        self.exchanges: list[Exchange] = []
        self.calls: list[PairCall] = []
        self.blocking: list[tuple[float, float]] = []
        """(bytes, seconds that are hidden) of sums that all ranks wait for."""
        for step in program.steps():
            self._add_step(step)
        self.steps = program.period

    def step_timeline(self) -> StepTimeline:
        """Return the exchanges of the period with its computation."""
        timeline = self._timeline
        compute_s = self.steps * timeline.step_s
        return StepTimeline(compute_s, tuple(self.exchanges), self.steps, timeline.slowdown)

    def _add_step(self, step: int) -> None:
        offset_s = (step - self._program.first_step) * self._timeline.step_s
        index_of: dict[int, int] = {}
        for index, operation in enumerate(self._program.leaving(step)):
            if operation.kind is Kind.ALL_GATHER and operation.source is Source.GRADIENT:
                raise ConfigError(
                    "the size of the messages depends on the gradients (a sparse wire), so the "
                    "step has no price before the run"
                )
            if operation.clears or operation.route is None:
                hidden_s = self._seconds.due(operation) - self._seconds.gate(operation)
                self.blocking.append((operation.payload.num_bytes, hidden_s))
                continue
            if isinstance(operation.route, PairCall):
                self.calls.append(operation.route)
            if self._joins_last(operation, offset_s):
                continue
            index_of[index] = len(self.exchanges)
            exchange = self._exchange(operation, index_of.get(operation.after or 0))
            self.exchanges.append(
                replace(
                    exchange, issue_s=exchange.issue_s + offset_s, due_s=exchange.due_s + offset_s
                )
            )

    def _joins_last(self, operation: Operation, offset_s: float) -> bool:
        """Add flags that have a message of their own to the bucket that they belong to."""
        if operation.source is not Source.SAMPLE or operation.block == ALL:
            return False
        last = self.exchanges[-1]
        num_bytes = last.num_bytes + operation.payload.num_bytes
        self.exchanges[-1] = replace(last, num_bytes=num_bytes)
        return True

    def _exchange(self, operation: Operation, follows: int | None) -> Exchange:
        issue_s, due_s = self._seconds.gate(operation), self._seconds.due(operation)
        route, payload = operation.route, operation.payload
        follows = follows if operation.after is not None else None
        if isinstance(route, PeerRound):
            num_bytes = payload.num_bytes / route.width
            lane, number = operation.lane, route.segment
            return Exchange(num_bytes, issue_s, due_s, lane, number, follows=follows)
        if operation.group is Group.INSIDE:
            return self._inside(
                operation, replace(Exchange(0.0, issue_s, due_s, operation.lane), follows=follows)
            )
        return Exchange(payload.num_bytes, issue_s, due_s, number=operation.block)

    def _inside(self, operation: Operation, exchange: Exchange) -> Exchange:
        """Return a sum or a gather in a group as messages around a ring, without the flags."""
        width = self._program.group_width
        block = self._program.blocks[operation.block]
        share = (width - 1) / width * block.numel * block.element_bytes
        if isinstance(operation.route, GroupGather):
            number = operation.route.round.segment
            return replace(exchange, num_bytes=share, inside=True, number=number)
        (lane,) = lanes_of(operation, self._program.mesh.size)
        hops = 2 * (width - 1)
        return replace(exchange, num_bytes=2 * share, inside=True, hops=hops, lane=lane)


class _MomentSeconds:
    """The moments of a step in seconds of computation since backward began."""

    def __init__(self, program: StepProgram, timeline: ComputeTimeline) -> None:
        self._program, self._timeline = program, timeline
        order = sorted(range(len(program.blocks)), key=lambda index: -program.blocks[index].unit)
        numels = [program.blocks[index].numel for index in order]
        total = sum(numels)
        ready = accumulate(
            (timeline.gradients_ready_s(program.blocks[index].names) for index in order), max
        )
        self._ready_s = dict(zip(order, ready, strict=True))
        self._until = dict(zip(order, accumulate(numels), strict=True))
        self._total = total

    def gate(self, operation: Operation) -> float:
        """Return when an operation may start; one that follows a sum starts after the update."""
        moment = operation.gate
        follows_update = operation.after is not None and self._program.updates is Updates.ON_ARRIVAL
        if follows_update and moment.phase is Phase.GRADIENT:
            return self._updated_s(moment.block)
        return self._seconds(moment)

    def due(self, operation: Operation) -> float:
        """Return when an operation is due."""
        due = operation.due
        if due._replace(later=0) == operation.gate:
            return self.gate(operation) + due.later * self._timeline.step_s
        return self._seconds(due) + due.later * self._timeline.step_s

    def _seconds(self, moment: Moment) -> float:
        timeline, phase, block = self._timeline, moment.phase, moment.block
        if phase is Phase.BACKWARD and block == ALL:
            return 0.0
        if phase is Phase.GRADIENT:
            return timeline.backward_s if block == ALL else self._ready_s[block]
        if phase is Phase.UPDATE:
            return timeline.backward_s + self._updated_before_s(block)
        if phase is Phase.UPDATED and block != ALL:
            return self._updated_s(block)
        if phase is Phase.FORWARD and block != ALL:
            return timeline.first_used_s(self._program.blocks[block].names)
        return timeline.forward_start_s

    def _updated_s(self, block: int) -> float:
        """Return when a block is updated during backward, one after another."""
        return self._ready_s[block] + self._timeline.update_s * self._until[block] / self._total

    def _updated_before_s(self, block: int) -> float:
        """Return the seconds of the updates of the blocks before one, after backward."""
        if block == ALL:
            return 0.0
        before = self._until[block] - self._program.blocks[block].numel
        return self._timeline.update_s * before / self._total


def _price_exchanges(program: StepProgram, period: _Period, costs: ProgramCosts) -> StepPrice:
    timeline = period.step_timeline()
    if period.calls:
        peer_of = period.calls[0].peer_of
        return price_pairwise_averaging(timeline, peer_of, LAG, costs.cluster)
    if program.topology is not None:
        groups = program.mesh.size // program.group_width
        pattern = pattern_of_groups(program.topology, groups, program.mesh.size)
        return price_peer_exchanges(timeline, pattern, costs.cluster)
    return price_exchanges_by_all_reduce(timeline, costs.choose_table(), costs.cluster)


def _add_blocking(found: StepPrice, period: _Period, costs: ProgramCosts) -> StepPrice:
    """Return the price with the sums that all ranks wait for, as the mean over the period."""
    if not period.blocking:
        return found
    prices = AllReduceCosts(costs.choose_table(), costs.cluster)
    each = [prices.cost_of(num_bytes) for num_bytes, _ in period.blocking]
    waits = [
        max(0.0, cost.isolated_s - hidden_s)
        for cost, (_, hidden_s) in zip(each, period.blocking, strict=True)
    ]
    per_link = found.bytes_per_link + sum(cost.bytes_per_link for cost in each) / period.steps
    breakdown_s = dict(found.breakdown_s)
    for cost in each:
        for kind, took in cost.breakdown_s.items():
            breakdown_s[kind] = breakdown_s.get(kind, 0.0) + took / period.steps
    bound_s = max(found.compute_s, per_link / costs.cluster.between.bytes_per_s)
    seconds = max(found.seconds + sum(waits) / period.steps, bound_s)
    return StepPrice(seconds, found.compute_s, per_link, bound_s, breakdown_s)
