"""Errands: in order, several in flight, failures where they are waited for, nothing allocated."""

import re
import threading
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from stretto.cluster.world import Mesh
from stretto.comm.algorithms import ALL_GATHER, ALLREDUCE
from stretto.comm.courier import Courier
from stretto.comm.local import run_local
from stretto.comm.recording import RecordingChannel
from stretto.errors import ChannelError, ScheduleError, StrettoError

WORDS = [("ring", 1), ("ring", 4), ("hierarchical", 3), ("doubling", 1), ("native", 1)]


def test_many_errands_in_flight_each_become_their_own_sum():
    mesh = Mesh((2, 2))

    def work(channel):
        tensors = [torch.full((1000 + i,), float(channel.rank + i)) for i in range(20)]
        with Courier(channel) as courier:
            schedules = [ALLREDUCE[name](mesh, parts) for name, parts in WORDS * 4]
            errands = courier.prepare_all(schedules, tensors)
            for pending in [courier.start(errand) for errand in errands]:
                pending.wait()
                assert pending.finished_s is not None
        return [tensor.unique().tolist() for tensor in tensors]

    results = run_local(mesh, work)
    assert results == [[[6.0 + 4 * i] for i in range(20)]] * 4


def test_an_errand_runs_again_on_what_the_tensor_holds_then():
    def work(channel):
        mine = torch.ones(10)
        with Courier(channel) as courier:
            errand = courier.prepare(ALLREDUCE["ring"](channel.mesh, 2), mine)
            for _ in range(3):
                courier.run(errand)
        return mine.unique().tolist()

    assert run_local(3, work) == [[27.0]] * 3


@pytest.mark.parametrize(("name", "parts"), WORDS[:-1])
def test_in_steady_state_no_tensor_is_allocated(name, parts):
    """The channel's own copies aside: threads hand each other clones."""
    mesh = Mesh((2, 2))
    allocated = []

    class Quiet:
        """A channel on which nothing travels: what is left is the executor itself."""

        rank, size = 0, 4

        def __init__(self):
            self.mesh = mesh

        def exchange(self, sends, receives):
            pass

        def start_all_reduce(self, tensor):
            raise AssertionError("not native")

    courier = Courier(Quiet())
    courier._agreed.add("everything")
    courier.agree = lambda *_errands: None
    errand = courier.prepare(ALLREDUCE[name](mesh, parts), torch.zeros(4000))
    for leg in errand.legs:
        leg.run(courier._channel)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for leg in errand.legs:
            leg.run(courier._channel)
    allocated = [e for e in seen.events() if e.name == "[memory]" or e.self_cpu_memory_usage > 0]
    assert allocated == []


def test_a_failure_comes_out_where_it_is_waited_for_and_names_the_place():
    def work(channel):
        if channel.rank == 2:
            return "gone"
        mine = torch.ones(12)
        with Courier(channel) as courier:
            courier.agree = lambda *_errands: None  # rank 2 is not there to be asked
            errand = courier.prepare(ALLREDUCE["ring"](Mesh((3,)), 2), mine)
            first, second = courier.start(errand), courier.start(errand)
            for pending in (first, second):
                with pytest.raises(ChannelError) as failure:
                    pending.wait()
        return str(failure.value)

    said = run_local(3, work, timeout_s=0.3)
    assert "rank 0 waits for rank 2" in said[0]
    # Its two lanes run beside each other: either may be the first to give up.
    assert re.search(
        r"in ring/2 for 3 ranks, round [15] of 8 of rank 0, which sends chunks", said[0]
    )


def test_ranks_that_mean_different_messages_are_told_before_anything_is_sent():
    def work(channel):
        recorder = RecordingChannel(channel)
        mine = torch.ones(10 if channel.rank != 1 else 11)
        with Courier(recorder) as courier:
            errand = courier.prepare(ALLREDUCE["ring"](channel.mesh, 1), mine)
            with pytest.raises(ChannelError) as failure:
                courier.start(errand)
        assert all(message.peer == -1 for message in recorder.sent)
        return str(failure.value)

    for said in run_local(3, work):
        assert "rank 0 begins ring over 10 x torch.float32, rank 1 ring over 11" in said


def test_threads_end_with_the_courier():
    before = set(threading.enumerate())

    def work(channel):
        courier = Courier(channel)
        errand = courier.prepare(ALLREDUCE["hierarchical"](channel.mesh, 2), torch.ones(8))
        courier.start(errand).wait()
        courier.close()
        courier.close()
        with pytest.raises(StrettoError, match="closed"):
            courier.start(errand)

    run_local(2, work)
    deadline_s = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert set(threading.enumerate()) == before


def test_a_schedule_for_other_ranks_and_a_tensor_with_gaps_are_refused():
    def work(channel):
        with Courier(channel) as courier:
            with pytest.raises(ScheduleError, match="made for 3 ranks, the channel has 2"):
                courier.prepare(ALLREDUCE["ring"](Mesh((3,)), 1), torch.ones(4))
            with pytest.raises(ScheduleError, match="contiguous"):
                courier.prepare(ALLREDUCE["ring"](Mesh((2,)), 1), torch.ones(4, 4)[:, 1])

    run_local(2, work)


def test_a_frugal_courier_keeps_no_room_when_nothing_travels():
    def work(channel):
        def kept(courier):
            return sum(room.untyped_storage().nbytes() for room in courier._scratch._rooms.values())

        with Courier(channel, frugal=True) as courier:
            summed, gathered = torch.ones(4098), torch.zeros(4098)
            gathered.chunk(channel.size)[channel.rank].fill_(channel.rank + 1.0)
            schedules = [ALLREDUCE["ring"](channel.mesh, 2), ALL_GATHER["ring"](channel.mesh, 1)]
            errands = courier.prepare_all(schedules, [summed, gathered])
            before = kept(courier)
            for _ in range(3):
                flights = [courier.start(errand) for errand in (*errands, *errands)]
                for flight in flights:
                    flight.wait()
        return before, kept(courier), summed, gathered

    for before, after, summed, gathered in run_local(3, work):
        assert before == after == 0
        assert torch.equal(summed, torch.full((4098,), 3.0**6))
        assert gathered.unique().tolist() == [1.0, 2.0, 3.0]
