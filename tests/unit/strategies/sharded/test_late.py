"""Memory that is released late, as on a GPU, stays within the plan."""

import pytest
import torch

from stretto.comm.in_process_transports import run_threads
from stretto.models import GPTConfig, build_model, per_sample_loss
from stretto.planner.memory import compute_unit_memory, worst_case_curve
from stretto.planner.plan import ElementBytes
from stretto.planner.presets import PLAN_PRESETS
from stretto.strategies.sharded.comm_streams import InlineStreams
from stretto.strategies.sharded.config import ShardedConfig
from stretto.strategies.sharded.sharded import Sharded


class Late(InlineStreams):
    """Gives back what is waited for, and nothing before."""

    def __init__(self):
        self._kept = []

    def release_after(self, names, release):
        self._kept.append((set(names), release))

    def wait_for(self, names):
        requested = set(names)
        kept, self._kept = self._kept, []
        for left, release in kept:
            if left <= requested:
                release()
            else:
                self._kept.append((left - requested, release))


@pytest.mark.parametrize("reduce_slots", [0, 2])
@pytest.mark.parametrize("name", PLAN_PRESETS)
def test_no_slot_keeps_more_than_the_plan_says(monkeypatch, name, reduce_slots):
    """The model reads its positions without a call: nobody sees the end of that unit's forward."""
    monkeypatch.setattr("stretto.strategies.sharded.engine.InlineStreams", Late)

    def work(transport):
        model = build_model(GPTConfig(vocab=64, context=16, width=32, blocks=6, heads=2), 0)
        config = ShardedConfig(plan=name, reduce_slots=reduce_slots, prefetch=2, unit=10_000)
        strategy = Sharded(config, transport)
        strategy.inline = True
        model, _ = strategy.attach(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        tokens = torch.arange(17).view(1, 17)
        for step in range(4):
            strategy.begin(step, 0, True, 0.1)
            if step == 2:
                strategy.memory_tracker.reset_peaks()
            per_sample_loss(model(tokens[:, :-1]), tokens[:, 1:]).sum().backward()
            strategy.after_backward()
            strategy.after_update()
        peaks = list(strategy.memory_tracker.peaks)
        held = [
            compute_unit_memory(
                unit,
                h.sharded.layout,
                ElementBytes(state=4),
                h.sharded.rank,
                barrier=False,
            )
            for unit, h in zip(strategy.plan.units, strategy.inspect().units, strict=True)
        ]
        strategy.close()
        return peaks, worst_case_curve(strategy.plan, held)

    for peaks, worst in run_threads(2, work):
        assert all(kept <= most for kept, most in zip(peaks, worst, strict=True))
        assert max(peaks) > 0.9 * max(worst)
