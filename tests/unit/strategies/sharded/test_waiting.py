"""Waits of forward and backward are reported as communication, and messages are recorded."""

from itertools import pairwise

import torch
from torch import nn

from stretto.comm.in_process_transports import EmulatedLink, run_threads
from stretto.planner.plan import MessageKind
from stretto.planner.presets import UnitShape, preset_plan
from stretto.strategies.sharded.config import ShardedConfig
from stretto.strategies.sharded.scheduler import MessageTask, MessageTimeline
from stretto.strategies.sharded.sharded import Sharded
from stretto.telemetry.timeline import Recorder

BYTES_PER_S = 64 * 64 * 4 / 0.02
"""A layer's parameters take 20 ms."""


def waited_s(transport):
    link = EmulatedLink(transport, latency_s=0.0, bytes_per_s=BYTES_PER_S)
    strategy = Sharded(ShardedConfig(plan="zero3", unit=0, prefetch=0), link)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    model, _ = strategy.attach(model, lambda p: torch.optim.SGD(p, lr=0.01))
    waited = []
    for step in range(3):
        strategy.begin(step, 0, True, 0.01)
        model(torch.ones(1, 64)).sum().backward()
        waited.append(strategy.after_backward().waited_s)
        strategy.after_update()
    strategy.close()
    return waited[-1]


def test_a_model_that_is_gathered_as_it_runs_waits_for_every_layer():
    # Two ranks: half of each layer crosses the link, 10 ms; at least four gathers and three again.
    assert min(run_threads(2, waited_s)) > 0.05


def test_messages_are_drawn_one_after_another_with_their_bytes():
    def work(transport):
        recorder = Recorder(transport.rank)
        strategy = Sharded(ShardedConfig(plan="zero3", unit=0), transport, recorder)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        model, _ = strategy.attach(model, lambda p: torch.optim.SGD(p, lr=0.01))
        for step in range(2):
            strategy.begin(step, 0, True, 0.01)
            model(torch.ones(1, 64)).sum().backward()
            strategy.after_backward()
            strategy.after_update()
        strategy.consolidate()
        strategy.close()
        return [span for span in recorder.timeline().spans if span.lane == "comm 0"]

    for spans in run_threads(2, work):
        names = {span.name for span in spans}
        assert {"unshard 0", "unshard 1", "unshard_for_backward 0", "reduce 0", "reduce 1"} <= names
        assert all(span.num_bytes >= 64 * 64 * 4 for span in spans)
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))


def test_a_message_may_begin_again_before_it_has_landed():
    plan = preset_plan("dear", [UnitShape("a", 4)])
    gather = next(message for message in plan.messages if message.what is MessageKind.UNSHARD)
    recorder = Recorder(0)

    def work(transport):
        strategy = Sharded(ShardedConfig(plan="dear"), transport)
        strategy.attach(nn.Linear(4, 1, bias=False), lambda p: torch.optim.SGD(p, lr=0.01))
        message_timeline = MessageTimeline(plan, strategy.inspect().updates.sharded_units, recorder)
        for cycle in range(2):
            message_timeline.on_start(MessageTask(cycle, gather))
        for cycle in range(2):
            message_timeline.on_complete(MessageTask(cycle, gather))
        strategy.close()

    run_threads(1, work)
    first, second = recorder.timeline().spans
    assert first.end_s <= second.start_s
