"""The collective executor: order, several sums in flight, failures, and no allocation."""

import re
import threading
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import ALL_GATHER, ALLREDUCE
from stretto.comm.bound_schedule import BufferPool
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.in_process_transports import RecordingTransport, run_threads
from stretto.errors import ScheduleError, StrettoError, TransportError

ALGORITHMS = [("ring", 1), ("ring", 4), ("hierarchical", 3), ("doubling", 1), ("native", 1)]


def test_many_schedules_in_flight_each_give_their_own_sum():
    mesh = Mesh((2, 2))

    def work(transport):
        tensors = [torch.full((1000 + i,), float(transport.rank + i)) for i in range(20)]
        with CollectiveExecutor(transport) as executor:
            schedules = [ALLREDUCE[name](mesh, parts) for name, parts in ALGORITHMS * 4]
            bound_schedules = executor.prepare_all(schedules, tensors)
            for handle in [executor.start(bound) for bound in bound_schedules]:
                handle.wait()
                assert handle.finished_s is not None
        return [tensor.unique().tolist() for tensor in tensors]

    results = run_threads(mesh, work)
    assert results == [[[6.0 + 4 * i] for i in range(20)]] * 4


def test_a_bound_schedule_runs_again_on_the_current_values_of_the_tensor():
    def work(transport):
        tensor = torch.ones(10)
        with CollectiveExecutor(transport) as executor:
            bound = executor.prepare(ALLREDUCE["ring"](transport.mesh, 2), tensor)
            for _ in range(3):
                executor.run(bound)
        return tensor.unique().tolist()

    assert run_threads(3, work) == [[27.0]] * 3


@pytest.mark.parametrize(("name", "parts"), ALGORITHMS[:-1])
def test_in_steady_state_no_tensor_is_allocated(name, parts):
    """The transport is a stub, because threads send each other clones."""
    mesh = Mesh((2, 2))

    class Silent:
        """A transport that sends nothing, so that only the executor itself could allocate."""

        rank, size = 0, 4

        def __init__(self):
            self.mesh = mesh

        def exchange(self, sends, receives):
            pass

        def start_all_reduce(self, tensor):
            raise AssertionError("not native")

    transport = Silent()
    executor = CollectiveExecutor(transport)
    executor.check_same_on_all_ranks = lambda *_bound_schedules: None
    bound = executor.prepare(ALLREDUCE[name](mesh, parts), torch.zeros(4000))

    def run_stages():
        for stage in bound.stages:
            stage.run(transport)

    run_stages()
    assert allocations(run_stages) == []
    assert allocations(lambda: (run_stages(), torch.empty(1000)))  # else nothing would be seen


def allocations(work):
    """Return the profiler's events in which ``work`` allocates memory."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    return [e for e in seen.events() if e.name == "[memory]" or e.self_cpu_memory_usage > 0]


def test_a_failure_is_raised_by_wait_and_names_the_round():
    def work(transport):
        if transport.rank == 2:
            return "gone"
        tensor = torch.ones(12)
        with CollectiveExecutor(transport) as executor:
            # Rank 2 takes no part, so the check would fail before the collective.
            executor.check_same_on_all_ranks = lambda *_bound_schedules: None
            bound = executor.prepare(ALLREDUCE["ring"](Mesh((3,)), 2), tensor)
            first, second = executor.start(bound), executor.start(bound)
            for handle in (first, second):
                with pytest.raises(TransportError) as failure:
                    handle.wait()
        return str(failure.value)

    errors = run_threads(3, work, timeout_s=0.3)
    assert "rank 0 waits for rank 2" in errors[0]
    # Its two lanes run concurrently: either may be the first to fail.
    assert re.search(
        r"in ring/2 for 3 ranks, round [15] of 8 of rank 0, which sends chunks", errors[0]
    )


def test_ranks_that_disagree_get_an_error_before_anything_is_sent():
    def work(transport):
        recorder = RecordingTransport(transport)
        tensor = torch.ones(10 if transport.rank != 1 else 11)
        with CollectiveExecutor(recorder) as executor:
            bound = executor.prepare(ALLREDUCE["ring"](transport.mesh, 1), tensor)
            with pytest.raises(TransportError) as failure:
                executor.start(bound)
        assert all(message.peer == -1 for message in recorder.sent)
        return str(failure.value)

    for error in run_threads(3, work):
        assert "rank 0 begins ring over 10 x torch.float32, rank 1 ring over 11" in error


def test_threads_end_with_the_executor():
    before = set(threading.enumerate())

    def work(transport):
        executor = CollectiveExecutor(transport)
        bound = executor.prepare(ALLREDUCE["hierarchical"](transport.mesh, 2), torch.ones(8))
        executor.start(bound).wait()
        executor.close()
        executor.close()
        with pytest.raises(StrettoError, match="closed"):
            executor.start(bound)

    run_threads(2, work)
    deadline_s = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert set(threading.enumerate()) == before


def test_a_schedule_for_other_ranks_and_a_non_contiguous_tensor_are_refused():
    def work(transport):
        with CollectiveExecutor(transport) as executor:
            with pytest.raises(ScheduleError, match="made for 3 ranks, the transport has 2"):
                executor.prepare(ALLREDUCE["ring"](Mesh((3,)), 1), torch.ones(4))
            with pytest.raises(ScheduleError, match="contiguous"):
                executor.prepare(ALLREDUCE["ring"](Mesh((2,)), 1), torch.ones(4, 4)[:, 1])

    run_threads(2, work)


class Remembering(BufferPool):
    """Remembers all buffers that it has handed out."""

    def __init__(self, **more):
        super().__init__(**more)
        self.buffers = []

    def get_buffers(self, *arguments):
        found = super().get_buffers(*arguments)
        self.buffers += found
        return found

    def num_bytes(self):
        storages = {buffer.untyped_storage() for buffer in self.buffers}
        return sum(storage.nbytes() for storage in storages)


@pytest.mark.parametrize("frees", [True, False])
def test_with_free_idle_buffers_an_idle_executor_has_no_memory(frees, monkeypatch):
    made = threading.local()

    def make_pool(**more):
        made.pool = Remembering(**more)
        return made.pool

    monkeypatch.setattr("stretto.comm.collective_executor.BufferPool", make_pool)

    def work(transport):
        with CollectiveExecutor(transport, free_idle_buffers=frees) as executor:
            pool = made.pool
            summed, gathered = torch.ones(4098), torch.zeros(4098)
            gathered.chunk(transport.size)[transport.rank].fill_(transport.rank + 1.0)
            schedules = [
                ALLREDUCE["ring"](transport.mesh, 2),
                ALL_GATHER["ring"](transport.mesh, 1),
            ]
            bound_schedules = executor.prepare_all(schedules, [summed, gathered])
            before = pool.num_bytes()
            for _ in range(3):
                all_running = [
                    executor.start(bound) for bound in (*bound_schedules, *bound_schedules)
                ]
                for running in all_running:
                    running.wait()
        return before, pool.num_bytes(), summed, gathered

    for before, after, summed, gathered in run_threads(3, work):
        assert (before == 0, after == 0) == (frees, frees)
        assert torch.equal(summed, torch.full((4098,), 3.0**6))
        assert gathered.unique().tolist() == [1.0, 2.0, 3.0]
