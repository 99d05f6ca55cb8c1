import threading

import numpy as np
import pytest
import torch

from stretto.data.loader import Prefetch
from stretto.data.order import Share
from stretto.errors import ConfigError


class Counting:
    """A source whose inputs are the indices; it tells when each batch has been made."""

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


def shares(count):
    return [Share(np.array([i, i + 50])) for i in range(count)]


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("stretto-data")]


def test_shares_come_in_order_with_their_tensors():
    given = shares(7)
    with Prefetch(Counting(), iter(given)) as loaded:
        got = list(loaded)
    assert [item.share for item in got] == given
    assert [item.inputs.tolist() for item in got] == [[i, i + 50] for i in range(7)]
    assert [item.targets.tolist() for item in got] == [[-i, -i - 50] for i in range(7)]


def test_the_source_is_told_the_epoch_of_each_share():
    source = Counting()
    with Prefetch(source, [Share(np.arange(2), epoch) for epoch in (4, 4, 5)]) as loaded:
        list(loaded)
    assert source.epochs == [4, 4, 5]


def test_while_a_cache_fills_nothing_of_the_next_pass_is_read_before_this_one_is_over():
    source = Counting()
    source.fills_cache = True
    passes = [Share(np.arange(2), epoch) for epoch in (0, 0, 1, 1, 2)]
    seen = []
    with Prefetch(source, passes) as loaded:
        for item in loaded:
            seen.append(item.share.epoch)
            assert max(source.epochs) == item.share.epoch
    assert seen == [0, 0, 1, 1, 2]


def test_the_next_batch_is_made_before_it_is_asked_for():
    source = Counting()
    with Prefetch(source, shares(5)) as loaded:
        next(loaded)
        # Would wait for ever (and fail by the time limit) if loading waited for `next`.
        assert all(source.made.acquire(timeout=10) for _ in range(3))


def test_no_more_than_depth_are_made_ahead():
    source = Counting()
    with Prefetch(source, shares(50), depth=3) as loaded:
        next(loaded)
        for _ in range(4):
            source.made.acquire(timeout=10)
        # The worker takes jobs one by one: when this one is through, so is all before it.
        loaded._pool.submit(int).result()
        assert source.count == 4


def test_waiting_is_measured():
    source, gate = Counting(), threading.Event()
    unhindered = source.batch

    def gated(indices, epoch):
        gate.wait(10)
        return unhindered(indices, epoch)

    source.batch = gated
    with Prefetch(source, shares(1)) as loaded:
        opener = threading.Timer(0.05, gate.set)
        opener.start()
        waited_s = next(loaded).wait_s
        opener.join()
    assert 0.02 < waited_s < 10


def test_an_error_of_the_source_comes_out_at_its_share():
    with Prefetch(Counting(fail_at=2), shares(5)) as loaded:
        assert [next(loaded).share.samples[0] for _ in range(2)] == [0, 1]
        with pytest.raises(OSError, match="disk trouble at 2"):
            next(loaded)


def test_an_error_of_the_shares_comes_out():
    def broken():
        yield from shares(1)
        raise ValueError("no more order")

    with Prefetch(Counting(), broken()) as loaded:
        next(loaded)
        with pytest.raises(ValueError, match="no more order"):
            next(loaded)


def test_nothing_follows_an_error():
    loaded = Prefetch(Counting(fail_at=0), shares(5))
    with pytest.raises(OSError, match="disk trouble"):
        next(loaded)
    assert list(loaded) == []


def test_no_thread_is_left_after_an_error_in_the_consumer():
    def consume():
        with Prefetch(Counting(), shares(50)) as loaded:
            next(loaded)
            raise RuntimeError("loss is not finite")

    with pytest.raises(RuntimeError, match="loss"):
        consume()
    assert loader_threads() == []


def test_no_thread_is_left_after_the_last_share():
    loaded = Prefetch(Counting(), shares(3))
    assert len(list(loaded)) == 3
    assert loader_threads() == []


def test_no_thread_is_left_after_an_error_in_the_source():
    loaded = Prefetch(Counting(fail_at=0), shares(3))
    with pytest.raises(OSError, match="disk trouble"):
        next(loaded)
    assert loader_threads() == []


def test_a_closed_loader_gives_nothing_and_can_be_closed_again():
    loaded = Prefetch(Counting(), shares(3))
    loaded.close()
    loaded.close()
    assert list(loaded) == []


def test_loading_nothing_ahead_is_refused():
    with pytest.raises(ConfigError, match="depth must be at least 1"):
        Prefetch(Counting(), shares(3), depth=0)
