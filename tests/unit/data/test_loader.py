import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stretto.data.loader import Prefetcher
from stretto.data.order import RankSamples
from stretto.errors import ConfigError


class Counting:
    """A source whose inputs are the indices; it sets an event when each batch has been made."""

    num_samples = 100
    fills_cache = False

    def __init__(self, fail_at=None):
        self.made = threading.Semaphore(0)
        self.count = 0
        self.epochs = []
        self.fail_at = fail_at

    def batch(self, indices, epoch=0):
        self.epochs.append(epoch)
        if self.fail_at in indices:
            raise OSError(f"disk trouble at {self.fail_at}")
        self.count += 1
        self.made.release()
        tensor = torch.from_numpy(indices)
        return tensor, -tensor


def make_samples(count):
    return [RankSamples(np.array([i, i + 50])) for i in range(count)]


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("stretto-data")]


def test_batches_arrive_in_order_with_their_tensors():
    given = make_samples(7)
    with Prefetcher(Counting(), iter(given)) as loaded:
        got = list(loaded)
    assert [item.local_samples for item in got] == given
    assert [item.inputs.tolist() for item in got] == [[i, i + 50] for i in range(7)]
    assert [item.targets.tolist() for item in got] == [[-i, -i - 50] for i in range(7)]


def test_the_source_gets_the_epoch_of_each_batch():
    source = Counting()
    with Prefetcher(source, [RankSamples(np.arange(2), epoch) for epoch in (4, 4, 5)]) as loaded:
        list(loaded)
    assert source.epochs == [4, 4, 5]


def test_while_a_cache_fills_the_next_epoch_is_not_loaded_ahead():
    source = Counting()
    source.fills_cache = True
    passes = [RankSamples(np.arange(2), epoch) for epoch in (0, 0, 1, 1, 2)]
    seen = []
    with Prefetcher(source, passes) as loaded:
        for item in loaded:
            seen.append(item.local_samples.epoch)
            while source.made.acquire(timeout=0.05):  # until nothing more is loaded ahead
                pass
            assert max(source.epochs) == item.local_samples.epoch
    assert seen == [0, 0, 1, 1, 2]


def test_without_a_cache_to_fill_the_next_epoch_is_loaded_ahead():
    source = Counting()
    with Prefetcher(source, [RankSamples(np.arange(2), epoch) for epoch in (0, 1)]) as loaded:
        next(loaded)
        assert all(source.made.acquire(timeout=10) for _ in range(2))
    assert source.epochs == [0, 1]


def test_the_next_batch_is_loaded_before_it_is_requested():
    source = Counting()
    with Prefetcher(source, make_samples(5)) as loaded:
        next(loaded)
        # This would hang (and hit the time limit) if loading waited for `next`.
        assert all(source.made.acquire(timeout=10) for _ in range(3))


def test_at_most_depth_batches_are_loaded_ahead():
    source, taken = Counting(), []
    samples = (taken.append(one) or one for one in make_samples(50))
    with Prefetcher(source, samples, depth=3) as loaded:
        assert len(taken) == 3
        next(loaded)
        assert all(source.made.acquire(timeout=10) for _ in range(4))
        assert len(taken) == 4  # what is taken is loaded, and nothing else
    assert source.count == 4


def test_wait_time_is_measured(monkeypatch):
    now, is_asked_for = SimpleNamespace(s=0.0), threading.Event()

    def read_clock():
        seen_s = now.s
        is_asked_for.set()
        return seen_s

    clock = SimpleNamespace(perf_counter=read_clock)
    monkeypatch.setattr("stretto.data.loader.time", clock)
    source = Counting()
    at_once = source.batch

    def late(indices, epoch):
        assert is_asked_for.wait(10)
        now.s += 3.0
        return at_once(indices, epoch)

    source.batch = late
    with Prefetcher(source, make_samples(1)) as loaded:
        assert next(loaded).wait_s == 3.0


def test_an_error_of_the_source_is_raised_for_its_batch():
    with Prefetcher(Counting(fail_at=2), make_samples(5)) as loaded:
        assert [next(loaded).local_samples.samples[0] for _ in range(2)] == [0, 1]
        with pytest.raises(OSError, match="disk trouble at 2"):
            next(loaded)


def test_an_error_of_the_sample_iterator_is_raised():
    def broken():
        yield from make_samples(1)
        raise ValueError("no more order")

    with Prefetcher(Counting(), broken()) as loaded:
        next(loaded)
        with pytest.raises(ValueError, match="no more order"):
            next(loaded)


def test_iteration_ends_after_an_error():
    loaded = Prefetcher(Counting(fail_at=0), make_samples(5))
    with pytest.raises(OSError, match="disk trouble"):
        next(loaded)
    assert list(loaded) == []


def test_no_thread_is_left_after_an_error_in_the_consumer():
    def consume():
        with Prefetcher(Counting(), make_samples(50)) as loaded:
            next(loaded)
            raise RuntimeError("loss is not finite")

    with pytest.raises(RuntimeError, match="loss"):
        consume()
    assert loader_threads() == []


def test_no_thread_is_left_after_the_last_batch():
    loaded = Prefetcher(Counting(), make_samples(3))
    assert len(list(loaded)) == 3
    assert loader_threads() == []


def test_no_thread_is_left_after_an_error_in_the_source():
    loaded = Prefetcher(Counting(fail_at=0), make_samples(3))
    with pytest.raises(OSError, match="disk trouble"):
        next(loaded)
    assert loader_threads() == []


def test_a_closed_loader_is_empty_and_can_be_closed_again():
    loaded = Prefetcher(Counting(), make_samples(3))
    loaded.close()
    loaded.close()
    assert list(loaded) == []


def test_depth_zero_is_refused():
    with pytest.raises(ConfigError, match="depth must be at least 1"):
        Prefetcher(Counting(), make_samples(3), depth=0)
