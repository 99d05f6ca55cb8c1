"""Peak live bytes of steps, compared with sums made by hand."""

import queue
import threading

import pytest
import torch
from torch import nn

from stretto.comm.in_process_transports import thread_transports
from stretto.errors import StrettoError
from stretto.profiler import meters
from stretto.profiler.meters import LiveBytesTracker, peak_between, peak_bytes
from stretto.strategies.sharded.config import ShardedConfig
from stretto.strategies.sharded.sharded import Sharded


@pytest.mark.parametrize(
    ("changes", "peak"),
    [
        ([], 0),
        ([(1, 100)], 100),  # allocated before and still live
        ([(1, 100), (2, -100)], 0),
        ([(1, 100), (12, 50), (13, -50), (14, 20)], 150),
        ([(1, 100), (12, -100), (13, 60)], 100),  # the peak is at the start
        ([(12, -100), (12, 60), (1, 100)], 160),  # at equal times allocations come first
        ([(1, 100), (21, 50)], 100),  # too late
        ([(13, 7), (11, 5), (12, -5)], 7),  # changes are ordered per thread only
    ],
)
def test_the_peak_between_two_times(changes, peak):
    assert peak_between(changes, 10, 20) == peak


class Steps:
    """A step runner whose bytes can be added up by hand."""

    def __init__(self):
        self.kept = torch.zeros(1000)

    def __call__(self):
        large = torch.zeros(2000)
        small = torch.zeros(500)
        del large
        other = torch.zeros(1000)
        del small, other

    def drain(self):
        pass

    def close(self):
        pass


def test_bytes_kept_between_steps_count_with_those_of_a_step():
    before = torch.zeros(10_000)
    assert peak_bytes(Steps, "cpu") == 4 * (1000 + 2000 + 500)
    assert before.numel() == 10_000


def test_a_layer_takes_its_weights_and_gradients():
    class Layer(Steps):
        def __init__(self):
            self.layer = nn.Linear(500, 500, bias=False)
            self.inputs = torch.zeros(1, 500)

        def __call__(self):
            self.layer(self.inputs).sum().backward()
            self.layer.weight.grad = None

    assert 2_000_000 < peak_bytes(Layer, "cpu") < 2_020_000


class Elsewhere(Steps):
    """Passes storages to its own thread, which frees them and allocates others."""

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
    # Without the thread's allocations it would be 6000 or 18000, without its releases 22000.
    assert peak_bytes(Elsewhere, "cpu") == 10_000


def test_a_thread_that_still_runs_after_close_is_an_error(monkeypatch):
    monkeypatch.setattr(meters, "JOIN_TIMEOUT_S", 0.01)
    runners = []

    class Forgetful(Elsewhere):
        def close(self):
            runners.append(self)

    with pytest.raises(StrettoError, match="still runs after its step runner was closed"):
        peak_bytes(Forgetful, "cpu")
    Elsewhere.close(runners[0])


def test_a_failure_restores_thread_and_profiler():
    run = threading.Thread.run
    with pytest.raises(ValueError, match="wrong"), LiveBytesTracker():
        raise ValueError("wrong")
    assert threading.Thread.run is run
    assert peak_bytes(Steps, "cpu") == 4 * 3500


@pytest.mark.parametrize("plan", ["ddp", "zero1", "dear", "zero2", "zero3"])
def test_a_sharded_step_never_measures_less_than_its_memory_tracker(plan):
    width, tracked_peaks = 128, []

    class Cut(Steps):
        def __init__(self):
            config = ShardedConfig(plan=plan, unit=width * width * 4)
            self.strategy = Sharded(config, thread_transports(1)[0])
            own = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))
            self.model, _ = self.strategy.attach(own, lambda p: torch.optim.SGD(p, lr=0.1))
            self.inputs = torch.zeros(1, width)
            self.step = 0

        def __call__(self):
            self.strategy.memory_tracker.reset_peaks()
            self.strategy.begin(self.step, 0, True, 0.1)
            self.model(self.inputs).sum().backward()
            self.strategy.after_backward()
            self.strategy.after_update()
            self.step += 1
            tracked_peaks.append(max(self.strategy.memory_tracker.peaks))

        def drain(self):
            self.strategy.consolidate()

        def close(self):
            self.strategy.close()

    peak = peak_bytes(Cut, "cpu")
    layer = width * width * 4
    assert tracked_peaks[-1] <= peak <= tracked_peaks[-1] + 2 * layer
