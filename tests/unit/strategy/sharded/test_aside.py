"""Streams of a GPU, played: what comes after what, and what does not have to.

Each stream knows all that is queued before its end; an event is a copy of that. So the order that a
GPU would have to keep can be read off without one, whatever happens to be quick on it.
"""

import pytest
import torch

from stretto.comm.channel import Finished
from stretto.strategy.sharded.aside import Streams


class Event:
    def __init__(self, before, over):
        self.before, self._over = frozenset(before), over

    def query(self):
        return self.before <= self._over


class GPU:
    """Streams, and what was queued on them."""

    def __init__(self):
        self.before = {}
        """What came before each thing that was done."""
        self.over = set()
        """What the GPU has done by now."""
        self.current = self.main = self.stream()

    def stream(self, *_args, **_words):
        gpu = self

        class Stream:
            def __init__(self):
                self.held = set()

            def record_event(self):
                return Event(self.held, gpu.over)

            def wait_event(self, event):
                self.held |= event.before

            def __enter__(self):
                self._outer, gpu.current = gpu.current, self

            def __exit__(self, *_):
                gpu.current = self._outer

        return Stream()

    def do(self, what):
        """Queue something on the current stream."""
        self.before[what] = set(self.current.held)
        self.current.held.add(what)

    def message(self, what):
        def start():
            self.do(what)
            return Finished(0.0)

        return start


@pytest.fixture
def gpu(monkeypatch):
    gpu = GPU()
    monkeypatch.setattr(torch.cuda, "Stream", gpu.stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpu.current)
    return gpu


@pytest.fixture
def streams(gpu):
    return Streams(torch.device("cpu"))


def test_a_message_comes_after_what_has_been_computed(gpu, streams):
    gpu.do("backward")
    streams.send("a", gpu.message("a"), 0)
    gpu.do("more")
    assert gpu.before["a"] == {"backward"}
    assert gpu.before["more"] == {"backward"}


def test_messages_of_one_lane_follow_each_other_and_those_of_two_do_not(gpu, streams):
    for name, lane in (("a", 0), ("b", 1), ("c", 0)):
        streams.send(name, gpu.message(name), lane)
    assert gpu.before["b"] == set()
    assert gpu.before["c"] == {"a"}


def test_a_landing_follows_its_own_message_though_another_was_sent_since(gpu, streams):
    streams.send("a", gpu.message("a"), 0)
    streams.send("b", gpu.message("b"), 1)
    with streams.landing("a"):
        gpu.do("update")
    assert gpu.before["update"] == {"a"}


def test_a_message_waits_for_landings_only_where_it_says_so(gpu, streams):
    streams.send("sum", gpu.message("sum"), 0)
    with streams.landing("sum"):
        gpu.do("update")
    streams.send("other", gpu.message("other"), 1)
    streams.send("gather", gpu.message("gather"), 2, after=["sum", "never sent"])
    assert gpu.before["other"] == set()
    assert gpu.before["gather"] == {"sum", "update"}


def test_who_waits_for_a_message_waits_for_its_landing(gpu, streams):
    streams.send("sum", gpu.message("sum"), 0)
    with streams.landing("sum"):
        gpu.do("update")
    streams.wait_for(["sum"])
    gpu.do("forward")
    assert gpu.before["forward"] == {"sum", "update"}


def test_memory_is_given_back_when_all_that_use_it_are_over_or_waited_for(gpu, streams):
    given = []
    for name, lane in (("a", 0), ("b", 1)):
        streams.send(name, gpu.message(name), lane)
    streams.give_back(["a", "b"], lambda: given.append("room"))
    streams.sweep()
    assert not given
    gpu.over.add("a")
    streams.sweep()
    assert not given, "b still reads it"
    streams.wait_for(["b"])
    assert given == ["room"]
    streams.sweep()
    assert given == ["room"], "once"
