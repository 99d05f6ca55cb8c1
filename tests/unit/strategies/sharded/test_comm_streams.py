"""Streams of a GPU, played: what comes after what, and what does not have to.

Each stream knows all that is queued before its end; an event is a copy of that. So the order that a
GPU would have to keep can be read off without one, whatever happens to be quick on it.
"""

import pytest
import torch

from stretto.comm.transport import CompletedWork
from stretto.strategies.sharded.comm_streams import SideStreams


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

    def stream(self, *_args, **_kwargs):
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
            return CompletedWork(0.0)

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
    return SideStreams(torch.device("cpu"))


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


def test_a_completion_follows_its_own_message_though_another_was_sent_since(gpu, streams):
    streams.send("a", gpu.message("a"), 0)
    streams.send("b", gpu.message("b"), 1)
    with streams.on_complete("a"):
        gpu.do("update")
    assert gpu.before["update"] == {"a"}


def test_a_message_waits_only_for_the_completions_that_it_names(gpu, streams):
    streams.send("sum", gpu.message("sum"), 0)
    with streams.on_complete("sum"):
        gpu.do("update")
    streams.send("other", gpu.message("other"), 1)
    streams.send("gather", gpu.message("gather"), 2, after=["sum", "never sent"])
    assert gpu.before["other"] == set()
    assert gpu.before["gather"] == {"sum", "update"}


def test_waiting_for_a_message_includes_its_completion(gpu, streams):
    streams.send("sum", gpu.message("sum"), 0)
    with streams.on_complete("sum"):
        gpu.do("update")
    streams.wait_for(["sum"])
    gpu.do("forward")
    assert gpu.before["forward"] == {"sum", "update"}


def test_memory_is_released_once_all_its_messages_are_complete_or_waited_for(gpu, streams):
    given = []
    for name, lane in (("a", 0), ("b", 1)):
        streams.send(name, gpu.message(name), lane)
    streams.release_after(["a", "b"], lambda: given.append("room"))
    streams.release_finished()
    assert not given
    gpu.over.add("a")
    streams.release_finished()
    assert not given, "b still reads it"
    streams.wait_for(["b"])
    assert given == ["room"]
    streams.release_finished()
    assert given == ["room"], "once"
