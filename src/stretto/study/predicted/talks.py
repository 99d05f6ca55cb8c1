"""Prices of gossip: segments leave as they are updated, or models visit others beside steps."""

from stretto.comm.buckets import WIRE
from stretto.errors import ConfigError
from stretto.sim.steps import Exchange, Rhythm, StepPrice, price_talks, price_visits
from stretto.strategy import ADPSGDConfig, GossipConfig
from stretto.strategy.gossip.segments import Named, cut_segments
from stretto.study.predicted.setting import Setting
from stretto.train.loose import LAG

_READ = {"kind", "topology", "peers", "segments", "delay", "every", "seed", "wire", "lanes"}
"""Settings that the price follows from."""


def price_gossip(setting: Setting) -> StepPrice:
    """Return the price of a step, in the mean over those from one round to the next.

    Raises:
        ConfigError: Something is set that the price would not follow.
    """
    strategy = setting.strategy
    assert isinstance(strategy, GossipConfig)
    _check_read(strategy)
    line, every = setting.line, strategy.every
    # Backward ends with the first layers: segments leave from the last to the first.
    segments = cut_segments(setting.known.model, strategy.segments)[::-1]
    lanes = min(strategy.lanes, len(segments))
    total = sum(p.numel() for segment in segments for _, p in segment)
    exchanges: list[Exchange] = []
    ready_s, updated = 0.0, 0
    # In which step of a period the round is does not matter to those that follow each other.
    for index, segment in enumerate(segments):
        ready_s = max(ready_s, line.ready(name for name, _ in segment))
        updated += sum(p.numel() for _, p in segment)
        leaves_s = ready_s + line.update_s * updated / total
        if setting.reads_gradients:
            leaves_s = line.forward_at_s
        due_s = leaves_s + strategy.delay * every * line.step_s
        if not strategy.delay:
            due_s = _needed(segment, setting)
        number = len(segments) - 1 - index  # as the model has them: first layers first
        num_bytes = _told_bytes(segment, strategy)
        exchanges.append(Exchange(num_bytes, leaves_s, due_s, index % lanes, number))
    rhythm = Rhythm(every * line.step_s, tuple(exchanges), every, line.slowdown)
    return price_talks(rhythm, strategy.who(), setting.cluster)


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
