"""Timing collectives with ranks as threads: every contender once a run, and right sums."""

import pytest

from stretto.cluster.world import Mesh
from stretto.comm.local import run_local
from stretto.comm.recording import RecordingChannel
from stretto.errors import ConfigError
from stretto.measure.collectives import COLLECTIVES, Trial, time_collective


@pytest.mark.parametrize("wire", ["own", "bf16", "fp8"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_algorithm_is_timed_in_every_run(collective, wire):
    trial = Trial(collective, 2_000_000, wire)
    words = {name: name for name in COLLECTIVES[collective] if name != "native"}
    calls = []

    def work(channel):
        peer = (lambda: calls.append(1)) if channel.rank == 0 else (lambda: None)
        return time_collective(trial, words, channel, runs=2, peer=peer)

    first, *others = run_local(Mesh((2, 2)), work)
    assert set(first) == {*words, "peer"}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in first.values())
    assert all(other == first for other in others)  # the slowest rank's time is everybody's
    assert len(calls) == 3  # a round before the first is not counted


def test_a_name_may_stand_for_another_word():
    def work(channel):
        recorder = RecordingChannel(channel)
        time_collective(Trial("allreduce", 4_000), {"hybrid": "ring/2"}, recorder, runs=1)
        return {m.num_bytes for m in recorder.sent if m.peer >= 0}

    assert run_local(2, work) == [{1000}] * 2


@pytest.mark.parametrize(("wire", "num_bytes"), [("own", 2000), ("bf16", 1000), ("fp8", 502)])
def test_what_travels_is_what_the_wire_makes_of_it(wire, num_bytes):
    def work(channel):
        recorder = RecordingChannel(channel)
        time_collective(Trial("allreduce", 4_000, wire), {"ring": "ring"}, recorder, runs=1)
        return {m.num_bytes for m in recorder.sent if m.peer >= 0}

    assert run_local(2, work) == [{num_bytes}] * 2


def test_entries_are_no_collective():
    def work(channel):
        with pytest.raises(ConfigError, match="timed by a training step"):
            time_collective(Trial("allreduce", 400, "topk 1%"), {"ring": "ring"}, channel, runs=1)

    run_local(2, work)


@pytest.mark.parametrize(("num_bytes", "numel"), [(0, 1), (3, 1), (4, 1), (4000, 1000)])
def test_there_is_always_something_to_send(num_bytes, numel):
    tensor = Trial("allreduce", num_bytes).tensor()
    assert tensor.numel() == numel
    assert tensor.eq(0).all()


def test_short_calls_are_timed_together():
    repeats = [Trial("allreduce", size).repeat for size in (1_000, 100_000, 10_000_000)]
    assert repeats == sorted(repeats, reverse=True)
    assert repeats[0] > repeats[-1] == 1
