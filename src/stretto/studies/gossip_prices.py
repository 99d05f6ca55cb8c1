"""Predict the step time of gossip strategies and of AD-PSGD.

Gossip sends each segment of the model once it is updated. AD-PSGD averages whole models in pairs
while the next step is computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stretto.collectives.codecs import WIRE_DTYPES
from stretto.errors import ConfigError
from stretto.simulator.peer_exchanges import pattern_of_groups
from stretto.simulator.step_price import StepPrice, price_pairwise_averaging, price_peer_exchanges
from stretto.simulator.step_timeline import Exchange, StepTimeline
from stretto.strategies import ADPSGDConfig, GossipConfig
from stretto.strategies.gossip.groups import RankGroup, group_of
from stretto.strategies.gossip.segments import NamedParameter, cut_segments
from stretto.studies.priced_run import ComputeTimeline, PriceRequest
from stretto.train.step_consensus import LAG

_PRICED_SETTINGS = {
    *("kind", "topology", "peers", "segments", "delay", "every", "seed", "wire", "lanes", "groups"),
}
"""The settings of gossip on which the price depends."""


def price_gossip(request: PriceRequest) -> StepPrice:
    """Return the price of a gossip step, averaged over the steps from one round to the next.

    Raises:
        ConfigError: A setting cannot be priced, or does not fit these ranks.
    """
    strategy, mesh = request.strategy, request.cluster.mesh
    assert isinstance(strategy, GossipConfig)
    _check_priceable(strategy)
    timeline, every = request.timeline, strategy.every
    group = group_of(0, mesh, strategy.groups, strategy.build_topology())
    # Backward ends with the first layers, so segments are sent from the last to the first.
    segments = cut_segments(request.description.model, strategy.segments)[::-1]
    exchanges: list[Exchange] = []
    # Periods follow each other, so it does not matter which of their steps has the round.
    for ready_segment in _ready_segments(segments, request):
        if group.width > 1:
            exchanges.append(_group_reduction(ready_segment, group, strategy, timeline))
        if group.count > 1:
            exchanges += _gossip_exchanges(
                ready_segment, group, request, follows=len(exchanges) - 1
            )
    if group.width > 1:
        for step in range(1, every):
            offset_s = step * timeline.step_s
            sums = [e for e in exchanges if e.inside and e.follows is None]
            exchanges += [
                replace(e, issue_s=e.issue_s + offset_s, due_s=e.due_s + offset_s) for e in sums
            ]
    step_timeline = StepTimeline(
        every * timeline.step_s, tuple(exchanges), every, timeline.slowdown
    )
    pattern = pattern_of_groups(strategy.build_topology(), group.count, mesh.size)
    return price_peer_exchanges(step_timeline, pattern, request.cluster)


@dataclass(frozen=True, slots=True)
class _ReadySegment:
    """A segment with the times at which it may be sent."""

    segment: list[NamedParameter]
    index: int
    """Its position in the order of sending."""
    number: int
    """Its position in the model, first layers first."""
    ready_s: float
    """When its gradients are ready."""
    updated_s: float
    """When it is updated and may be sent."""

    @property
    def num_bytes(self) -> int:
        return sum(p.nbytes for _, p in self.segment)


def _ready_segments(
    segments: list[list[NamedParameter]], request: PriceRequest
) -> Iterator[_ReadySegment]:
    timeline = request.timeline
    total = sum(p.numel() for segment in segments for _, p in segment)
    ready_s, updated_elements = 0.0, 0
    for index, segment in enumerate(segments):
        ready_s = max(ready_s, timeline.gradients_ready_s(name for name, _ in segment))
        updated_elements += sum(p.numel() for _, p in segment)
        updated_s = ready_s + timeline.update_s * updated_elements / total
        issue_s = timeline.forward_start_s if request.reads_gradients else updated_s
        yield _ReadySegment(segment, index, len(segments) - 1 - index, ready_s, issue_s)


def _group_reduction(
    ready_segment: _ReadySegment,
    group: RankGroup,
    strategy: GossipConfig,
    timeline: ComputeTimeline,
) -> Exchange:
    """Return the exchange that sums a segment's gradients over the ranks of a group, as a ring."""
    others = group.width - 1
    num_bytes = 2 * others / group.width * ready_segment.num_bytes
    lane = strategy.lanes  # a lane of its own, after those of the gossip rounds
    return Exchange(
        num_bytes, ready_segment.ready_s, timeline.backward_s, lane, inside=True, hops=2 * others
    )


def _gossip_exchanges(
    ready_segment: _ReadySegment, group: RankGroup, request: PriceRequest, follows: int
) -> list[Exchange]:
    """Return the exchanges of a segment's round.

    Each rank sends its shard to a peer group; the received shards are then gathered in the group.
    """
    strategy, timeline = request.strategy, request.timeline
    assert isinstance(strategy, GossipConfig)
    due_s = ready_segment.updated_s + strategy.delay * strategy.every * timeline.step_s
    if not strategy.delay:
        due_s = _needed_by_s(ready_segment.segment, request)
    sent = Exchange(
        _message_bytes(ready_segment.segment, strategy) / group.width,
        ready_segment.updated_s,
        due_s,
        ready_segment.index % strategy.lanes,
        ready_segment.number,
        follows=follows if group.width > 1 else None,
    )
    if group.width == 1:
        return [sent]
    share = (group.width - 1) / group.width
    num_bytes = share * ready_segment.num_bytes
    return [sent, replace(sent, num_bytes=num_bytes, inside=True, follows=follows + 1)]


def price_adpsgd(request: PriceRequest) -> StepPrice:
    """Return the price of an AD-PSGD step: ranks average with a peer during the next step.

    An active rank finishes one averaging before it starts the next. Passive ranks do not wait.
    """
    strategy, timeline = request.strategy, request.timeline
    assert isinstance(strategy, ADPSGDConfig)
    num_bytes = sum(p.nbytes for p in request.description.model.parameters() if p.requires_grad)
    issue_s = timeline.forward_start_s
    exchange = Exchange(num_bytes, issue_s, issue_s + timeline.step_s)
    step_timeline = StepTimeline(timeline.step_s, (exchange,), slowdown=timeline.slowdown)
    return price_pairwise_averaging(step_timeline, strategy.peer_of, LAG, request.cluster)


def _check_priceable(strategy: GossipConfig) -> None:
    """Refuse settings that the price does not model.

    Raises:
        ConfigError: Such a setting differs from its default.
    """
    for name, field in type(strategy).model_fields.items():
        value = getattr(strategy, name)
        if name not in _PRICED_SETTINGS and value != field.default:
            raise ConfigError(f"strategy.{name} = {value!r} has no price yet")
    if strategy.wire not in WIRE_DTYPES:
        raise ConfigError(
            f'strategy.wire = "{strategy.wire}" of gossip has no price yet: expected '
            f"{', '.join(WIRE_DTYPES)}"
        )


def _needed_by_s(segment: list[NamedParameter], request: PriceRequest) -> float:
    """Return the time on the timeline by which a segment must be received, if delay is 0.

    That is when its first module runs. If one of its modules may not be called by itself, it is the
    start of forward.
    """
    names = [name for name, _ in segment]
    if any(name.rpartition(".")[0] not in request.description.calls for name in names):
        return request.timeline.forward_start_s
    return request.timeline.first_used_s(names)


def _message_bytes(segment: list[NamedParameter], strategy: GossipConfig) -> int:
    """Return the bytes of one message; push-sum messages also carry a mass."""
    wire = WIRE_DTYPES[strategy.wire] or segment[0][1].dtype
    numel = sum(p.numel() for _, p in segment) + strategy.is_push_sum
    return numel * wire.itemsize
