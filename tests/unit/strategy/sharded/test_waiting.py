"""What forward and backward wait for is told as communication, and messages are drawn."""

from itertools import pairwise

import torch
from torch import nn

from stretto.comm.emulated import EmulatedLink
from stretto.comm.local import run_local
from stretto.plan.presets import Shape, named_plan
from stretto.plan.value import What
from stretto.strategy.sharded.config import ShardedConfig
from stretto.strategy.sharded.dispatcher import Task
from stretto.strategy.sharded.drawing import Drawing
from stretto.strategy.sharded.strategy import Sharded
from stretto.telemetry.timeline import Recorder

BYTES_PER_S = 64 * 64 * 4 / 0.02
"""A layer's parameters take 20 ms."""


def waited_s(channel):
    link = EmulatedLink(channel, latency_s=0.0, bytes_per_s=BYTES_PER_S)
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
    assert min(run_local(2, waited_s)) > 0.05


def test_messages_are_drawn_one_after_another_with_their_bytes():
    def work(channel):
        recorder = Recorder(channel.rank)
        strategy = Sharded(ShardedConfig(plan="zero3", unit=0), channel, recorder)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        model, _ = strategy.attach(model, lambda p: torch.optim.SGD(p, lr=0.01))
        for step in range(2):
            strategy.begin(step, 0, True, 0.01)
            model(torch.ones(1, 64)).sum().backward()
            strategy.after_backward()
            strategy.after_update()
        strategy.settle()
        strategy.close()
        return [span for span in recorder.timeline().spans if span.lane == "comm 0"]

    for spans in run_local(2, work):
        names = {span.name for span in spans}
        assert {"gather 0", "gather 1", "regather 0", "reduce 0", "reduce 1"} <= names
        assert all(span.num_bytes >= 64 * 64 * 4 for span in spans)
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))


def test_a_message_may_begin_again_before_it_has_landed():
    plan = named_plan("dear", [Shape("a", 4)])
    gather = next(message for message in plan.messages if message.what is What.GATHER)
    recorder = Recorder(0)

    def work(channel):
        strategy = Sharded(ShardedConfig(plan="dear"), channel)
        strategy.attach(nn.Linear(4, 1, bias=False), lambda p: torch.optim.SGD(p, lr=0.01))
        drawing = Drawing(plan, strategy._cut.updates.storages, recorder)
        for cycle in range(2):
            drawing.begun(Task(cycle, gather))
        for cycle in range(2):
            drawing.landed(Task(cycle, gather))
        strategy.close()

    run_local(1, work)
    first, second = recorder.timeline().spans
    assert first.end_s <= second.start_s
