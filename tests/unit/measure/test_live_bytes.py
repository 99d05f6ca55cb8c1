"""Bytes that live in a step, against sums made by hand: kept, freed elsewhere, cut up."""

import queue
import threading

import pytest
import torch
from torch import nn

from stretto.comm.local import local_channels
from stretto.errors import StrettoError
from stretto.measure import live_bytes
from stretto.measure.live_bytes import LiveBytes, peak_between, peak_bytes
from stretto.strategy.sharded.config import ShardedConfig
from stretto.strategy.sharded.strategy import Sharded


@pytest.mark.parametrize(
    ("changes", "peak"),
    [
        ([], 0),
        ([(1, 100)], 100),  # there before, and still there
        ([(1, 100), (2, -100)], 0),
        ([(1, 100), (12, 50), (13, -50), (14, 20)], 150),
        ([(1, 100), (12, -100), (13, 60)], 100),  # the most is what it begins with
        ([(12, -100), (12, 60), (1, 100)], 160),  # at one moment, what comes counts first
        ([(1, 100), (21, 50)], 100),  # too late
        ([(13, 7), (11, 5), (12, -5)], 7),  # threads tell their own in order, not all together
    ],
)
def test_the_most_between_two_moments(changes, peak):
    assert peak_between(changes, 10, 20) == peak


class Steps:
    """A contender whose bytes can be added up by hand."""

    def __init__(self):
        self.kept = torch.zeros(1000)

    def __call__(self):
        large = torch.zeros(2000)
        small = torch.zeros(500)
        del large
        other = torch.zeros(1000)
        del small, other

    def rest(self):
        pass

    def close(self):
        pass


def test_what_is_kept_and_what_comes_and_goes_is_added_up():
    before = torch.zeros(10_000)
    assert peak_bytes(Steps, "cpu") == 4 * (1000 + 2000 + 500)
    assert before.numel() == 10_000


def test_a_layers_weights_and_gradients_are_all_there_is():
    class Layer(Steps):
        def __init__(self):
            self.layer = nn.Linear(500, 500, bias=False)
            self.inputs = torch.zeros(1, 500)

        def __call__(self):
            self.layer(self.inputs).sum().backward()
            self.layer.weight.grad = None

    assert 2_000_000 < peak_bytes(Layer, "cpu") < 2_020_000


class Elsewhere(Steps):
    """Hands storages to a thread of its own, which empties them and makes others."""

    def __init__(self):
        self.work = queue.SimpleQueue()
        self.done = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while (tensor := self.work.get()) is not None:
            tensor.untyped_storage().resize_(0)
            own = torch.empty(0)
            own.untyped_storage().resize_(10_000)
            del own, tensor
            self.done.put(None)

    def __call__(self):
        for _ in range(3):
            tensor = torch.empty(0)
            tensor.untyped_storage().resize_(6_000)
            self.work.put(tensor)
            self.done.get()

    def close(self):
        self.work.put(None)
        self.thread.join()


def test_other_threads_are_followed():
    # If the thread's own were not seen it would be 6000 or 18000; if its releases were not, 22000.
    assert peak_bytes(Elsewhere, "cpu") == 10_000


def test_a_thread_that_goes_on_is_an_error_not_a_smaller_sum(monkeypatch):
    monkeypatch.setattr(live_bytes, "_PATIENCE_S", 0.01)
    contender = Elsewhere
    made = []

    class Forgetful(contender):
        def close(self):
            made.append(self)

    with pytest.raises(StrettoError, match="goes on after its contender was closed"):
        peak_bytes(Forgetful, "cpu")
    Elsewhere.close(made[0])


def test_nothing_is_left_behind_by_a_failure():
    run = threading.Thread.run
    with pytest.raises(ValueError, match="wrong"), LiveBytes():
        raise ValueError("wrong")
    assert threading.Thread.run is run
    assert peak_bytes(Steps, "cpu") == 4 * 3500


@pytest.mark.parametrize("plan", ["ddp", "zero1", "dear", "zero2", "zero3"])
def test_a_sharded_step_never_looks_smaller_than_its_ledger(plan):
    width, ledgers = 128, []

    class Cut(Steps):
        def __init__(self):
            config = ShardedConfig(plan=plan, unit=width * width * 4)
            self.strategy = Sharded(config, local_channels(1)[0])
            own = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))
            self.model, _ = self.strategy.attach(own, lambda p: torch.optim.SGD(p, lr=0.1))
            self.inputs = torch.zeros(1, width)
            self.step = 0

        def __call__(self):
            self.strategy.ledger.forget()
            self.strategy.begin(self.step, 0, True, 0.1)
            self.model(self.inputs).sum().backward()
            self.strategy.after_backward()
            self.strategy.after_update()
            self.step += 1
            ledgers.append(max(self.strategy.ledger.peaks))

        def rest(self):
            self.strategy.settle()

        def close(self):
            self.strategy.close()

    peak = peak_bytes(Cut, "cpu")
    layer = width * width * 4
    assert ledgers[-1] <= peak <= ledgers[-1] + 2 * layer
