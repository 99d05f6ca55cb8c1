"""Timing collectives with ranks as threads: what is timed, and what is sent."""

import pytest

from stretto.bench.collectives import COLLECTIVES, CollectiveTrial, time_collective
from stretto.cluster.world import Mesh
from stretto.comm.in_process_transports import RecordingTransport, run_threads
from stretto.errors import ConfigError


@pytest.mark.parametrize("wire", ["own", "bf16", "fp8"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_algorithm_is_timed_in_every_run(collective, wire):
    trial = CollectiveTrial(collective, 2_000_000, wire)
    algorithms = {name: name for name in COLLECTIVES[collective] if name != "native"}
    calls = []

    def work(transport):
        peer = (lambda: calls.append(1)) if transport.rank == 0 else (lambda: None)
        return time_collective(trial, algorithms, transport, runs=2, peer=peer)

    first, *others = run_threads(Mesh((2, 2)), work)
    assert set(first) == {*algorithms, "peer"}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in first.values())
    assert all(other == first for other in others)  # all ranks get the time of the slowest
    assert len(calls) == 3  # with the warm-up round


def test_a_label_may_differ_from_its_algorithm():
    def work(transport):
        recorder = RecordingTransport(transport)
        time_collective(CollectiveTrial("allreduce", 4_000), {"hybrid": "ring/2"}, recorder, runs=1)
        return {m.num_bytes for m in recorder.sent if m.peer >= 0}

    assert run_threads(2, work) == [{1000}] * 2


@pytest.mark.parametrize(("wire", "num_bytes"), [("own", 2000), ("bf16", 1000), ("fp8", 502)])
def test_messages_have_the_wire_format(wire, num_bytes):
    def work(transport):
        recorder = RecordingTransport(transport)
        time_collective(
            CollectiveTrial("allreduce", 4_000, wire), {"ring": "ring"}, recorder, runs=1
        )
        return {m.num_bytes for m in recorder.sent if m.peer >= 0}

    assert run_threads(2, work) == [{num_bytes}] * 2


def test_sparse_wire_formats_cannot_be_timed_as_collectives():
    def work(transport):
        with pytest.raises(ConfigError, match="timed by a training step"):
            time_collective(
                CollectiveTrial("allreduce", 400, "topk 1%"), {"ring": "ring"}, transport, runs=1
            )

    run_threads(2, work)


@pytest.mark.parametrize(("num_bytes", "numel"), [(0, 1), (3, 1), (4, 1), (4000, 1000)])
def test_there_is_always_something_to_send(num_bytes, numel):
    tensor = CollectiveTrial("allreduce", num_bytes).tensor()
    assert tensor.numel() == numel
    assert tensor.eq(0).all()


def test_short_calls_are_timed_together():
    repeats = [CollectiveTrial("allreduce", size).repeat for size in (1_000, 100_000, 10_000_000)]
    assert repeats == sorted(repeats, reverse=True)
    assert repeats[0] > repeats[-1] == 1
