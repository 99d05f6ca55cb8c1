"""Memory that is given back late, as on a GPU, only once the model has waited: still as planned."""

import pytest
import torch

from stretto.comm.local import run_local
from stretto.model import GPTConfig, build_model, per_sample_loss
from stretto.plan.memory import Widths, holding, worst_curve
from stretto.plan.presets import PRESETS
from stretto.strategy.sharded.aside import Here
from stretto.strategy.sharded.config import ShardedConfig
from stretto.strategy.sharded.strategy import Sharded


class Late(Here):
    """Gives back what is waited for, and nothing before."""

    def __init__(self):
        self._kept = []

    def give_back(self, names, release):
        self._kept.append((set(names), release))

    def wait_for(self, names):
        wanted = set(names)
        kept, self._kept = self._kept, []
        for left, release in kept:
            if left <= wanted:
                release()
            else:
                self._kept.append((left - wanted, release))


@pytest.mark.parametrize("pending", [0, 2])
@pytest.mark.parametrize("name", PRESETS)
def test_no_slot_keeps_more_than_the_plan_says(monkeypatch, name, pending):
    """The model reads its positions without a call: nobody sees the end of that unit's forward."""
    monkeypatch.setattr("stretto.strategy.sharded.engine.Here", Late)

    def work(channel):
        model = build_model(GPTConfig(vocab=64, context=16, width=32, blocks=6, heads=2), 0)
        config = ShardedConfig(plan=name, pending=pending, prefetch=2, unit=10_000)
        strategy = Sharded(config, channel)
        strategy.inline = True
        model, _ = strategy.attach(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        tokens = torch.arange(17).view(1, 17)
        for step in range(4):
            strategy.begin(step, 0, True, 0.1)
            if step == 2:
                strategy.ledger.forget()
            per_sample_loss(model(tokens[:, :-1]), tokens[:, 1:]).sum().backward()
            strategy.after_backward()
            strategy.after_update()
        peaks = list(strategy.ledger.peaks)
        held = [
            holding(unit, h.storage.layout, Widths(state=4), h.storage.rank, barrier=False)
            for unit, h in zip(strategy.plan.units, strategy._cut.units, strict=True)
        ]
        strategy.close()
        return peaks, worst_curve(strategy.plan, held)

    for peaks, worst in run_local(2, work):
        assert all(kept <= most for kept, most in zip(peaks, worst, strict=True))
        assert max(peaks) > 0.9 * max(worst)
