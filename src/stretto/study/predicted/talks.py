"""Prices of gossip: segments leave as they are updated, or models visit others beside steps."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stretto.comm.buckets import WIRE
from stretto.errors import ConfigError
from stretto.sim.steps import Exchange, Rhythm, StepPrice, of_groups, price_talks, price_visits
from stretto.strategy import ADPSGDConfig, GossipConfig
from stretto.strategy.gossip.group import Group, group_of
from stretto.strategy.gossip.segments import Named, cut_segments
from stretto.study.predicted.line import Line
from stretto.study.predicted.setting import Setting
from stretto.train.loose import LAG

_READ = {
    *("kind", "topology", "peers", "segments", "delay", "every", "seed", "wire", "lanes", "groups"),
}
"""Settings that the price follows from."""


def price_gossip(setting: Setting) -> StepPrice:
    """Return the price of a step, in the mean over those from one round to the next.

    Raises:
        ConfigError: Something is set that the price would not follow, or ranks cannot be so.
    """
    strategy, mesh = setting.strategy, setting.cluster.mesh
    assert isinstance(strategy, GossipConfig)
    _check_read(strategy)
    line, every = setting.line, strategy.every
    group = group_of(0, mesh, strategy.groups, strategy.who())
    # Backward ends with the first layers: segments leave from the last to the first.
    segments = cut_segments(setting.known.model, strategy.segments)[::-1]
    exchanges: list[Exchange] = []
    # In which step of a period the round is does not matter to those that follow each other.
    for leaving in _leavings(segments, setting):
        if group.width > 1:
            exchanges.append(_summed(leaving, group, strategy, line))
        if group.count > 1:
            exchanges += _round(leaving, group, setting, follows=len(exchanges) - 1)
    if group.width > 1:
        for step in range(1, every):
            later = step * line.step_s
            sums = [e for e in exchanges if e.inside and e.follows is None]
            exchanges += [
                replace(e, leaves_s=e.leaves_s + later, due_s=e.due_s + later) for e in sums
            ]
    rhythm = Rhythm(every * line.step_s, tuple(exchanges), every, line.slowdown)
    talk = of_groups(strategy.who(), group.count, mesh.size)
    return price_talks(rhythm, talk, setting.cluster)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A segment, and when it may leave."""

    segment: list[Named]
    index: int
    """In the order in which they leave."""
    number: int
    """As the model has them: first layers first."""
    ready_s: float
    """When it has its gradients."""
    updated_s: float

    @property
    def num_bytes(self) -> int:
        return sum(p.nbytes for _, p in self.segment)


def _leavings(segments: list[list[Named]], setting: Setting) -> Iterator[_Leaving]:
    line = setting.line
    total = sum(p.numel() for segment in segments for _, p in segment)
    ready_s, updated = 0.0, 0
    for index, segment in enumerate(segments):
        ready_s = max(ready_s, line.ready(name for name, _ in segment))
        updated += sum(p.numel() for _, p in segment)
        updated_s = ready_s + line.update_s * updated / total
        leaves_s = line.forward_at_s if setting.reads_gradients else updated_s
        yield _Leaving(segment, index, len(segments) - 1 - index, ready_s, leaves_s)


def _summed(leaving: _Leaving, group: Group, strategy: GossipConfig, line: Line) -> Exchange:
    """Return the sum of a segment's gradients round the members of a group."""
    others = group.width - 1
    num_bytes = 2 * others / group.width * leaving.num_bytes
    lane = strategy.lanes  # one of their own, behind those of rounds
    return Exchange(num_bytes, leaving.ready_s, line.backward_s, lane, inside=True, hops=2 * others)


def _round(leaving: _Leaving, group: Group, setting: Setting, follows: int) -> list[Exchange]:
    """Return a segment's round: shards to peers, and what was heard round the group."""
    strategy, line = setting.strategy, setting.line
    assert isinstance(strategy, GossipConfig)
    due_s = leaving.updated_s + strategy.delay * strategy.every * line.step_s
    if not strategy.delay:
        due_s = _needed(leaving.segment, setting)
    told = Exchange(
        _told_bytes(leaving.segment, strategy) / group.width,
        leaving.updated_s,
        due_s,
        leaving.index % strategy.lanes,
        leaving.number,
        follows=follows if group.width > 1 else None,
    )
    if group.width == 1:
        return [told]
    share = (group.width - 1) / group.width
    num_bytes = share * leaving.num_bytes
    return [told, replace(told, num_bytes=num_bytes, inside=True, follows=follows + 1)]


def price_asynchronous(setting: Setting) -> StepPrice:
    """Return the price of a step of ranks that visit others after an update, beside the next step.

    A visit is over before the next one begins. Those who are visited do not wait.
    """
    strategy, line = setting.strategy, setting.line
    assert isinstance(strategy, ADPSGDConfig)
    num_bytes = sum(p.nbytes for p in setting.known.model.parameters() if p.requires_grad)
    leaves_s = line.forward_at_s
    exchange = Exchange(num_bytes, leaves_s, leaves_s + line.step_s)
    rhythm = Rhythm(line.step_s, (exchange,), slowdown=line.slowdown)
    return price_visits(rhythm, strategy.whom, LAG, setting.cluster)


def _check_read(strategy: GossipConfig) -> None:
    """Refuse what is not looked at here: a price that leaves it out would be of another run."""
    for name, field in type(strategy).model_fields.items():
        value = getattr(strategy, name)
        if name not in _READ and value != field.default:
            raise ConfigError(f"strategy.{name} = {value!r} has no price yet")


def _needed(segment: list[Named], setting: Setting) -> float:
    """Return before which place of the line a segment must be heard, without a delay.

    Before its first module runs; before any does, where a module that has some of it may not be
    called by itself.
    """
    names = [name for name, _ in segment]
    if any(name.rpartition(".")[0] not in setting.known.calls for name in names):
        return setting.line.forward_at_s
    return setting.line.used(names)


def _told_bytes(segment: list[Named], strategy: GossipConfig) -> int:
    """Return the bytes of one message; where shares are pushed, their mass is in it."""
    wire = WIRE[strategy.wire] or segment[0][1].dtype
    numel = sum(p.numel() for _, p in segment) + strategy.pushes
    return numel * wire.itemsize
