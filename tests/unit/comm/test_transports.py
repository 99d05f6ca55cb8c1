"""Transports between threads and their wrappers; processes are tested in tests/multi."""

import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from stretto.comm.broadcast import all_reduce_mean_, broadcast_, broadcast_text
from stretto.comm.gloo import open_gloo
from stretto.comm.in_process_transports import EmulatedLink, run_threads
from stretto.comm.transport import P2POp
from stretto.errors import TransportError


def test_messages_between_two_ranks_arrive_in_order():
    def work(transport):
        if transport.rank == 0:
            for value in range(5):
                transport.exchange([P2POp(1, torch.tensor([float(value)]))], [])
            return []
        got = []
        for _ in range(5):
            received = torch.zeros(1)
            transport.exchange([], [P2POp(0, received)])
            got.append(received.item())
        return got

    assert run_threads(2, work)[1] == [0, 1, 2, 3, 4]


def test_lanes_do_not_mix():
    def work(transport):
        if transport.rank == 0:
            first, second = torch.tensor([1.0]), torch.tensor([2.0])
            transport.exchange([P2POp(1, first, lane=0), P2POp(1, second, lane=1)], [])
            return None
        buffers = torch.zeros(1), torch.zeros(1)
        transport.exchange([], [P2POp(0, buffers[1], lane=1), P2POp(0, buffers[0], lane=0)])
        return [buffer.item() for buffer in buffers]

    assert run_threads(2, work)[1] == [1.0, 2.0]


def test_a_failing_rank_wakes_the_others_and_its_own_error_is_raised():
    def work(transport):
        if transport.rank == 1:
            raise ValueError("rank 1 has had enough")
        transport.exchange([], [P2POp(1, torch.zeros(1))])

    start_s = time.monotonic()
    with pytest.raises(ValueError, match="had enough"):
        run_threads(3, work)
    assert time.monotonic() - start_s < 30


def test_a_time_out_raises_an_error_that_names_the_peer():
    def work(transport):
        if transport.rank == 0:
            transport.exchange([], [P2POp(1, torch.zeros(1))])

    with pytest.raises(TransportError, match=r"rank 0 waits for rank 1: no answer within 0\.2 s"):
        run_threads(2, work, timeout_s=0.2)


def test_receive_has_no_time_out():
    def work(transport):
        received = torch.zeros(1)
        if transport.rank:
            transport.receive(P2POp(0, received, lane=1))
        else:
            time.sleep(0.3)
            transport.exchange([P2POp(1, torch.ones(1), lane=1)], [])
        return received.item()

    assert run_threads(2, work, timeout_s=0.1)[1] == 1


def test_a_failing_rank_ends_the_receive_of_other_ranks():
    errors = []

    def work(transport):
        if transport.rank == 0:
            raise ValueError("odd")
        try:
            transport.receive(P2POp(0, torch.zeros(1)))
        except TransportError as failure:
            errors.append(str(failure))

    with pytest.raises(ValueError, match="odd"):
        run_threads(2, work)
    assert errors == ["rank 1 waits for rank 0: rank 0 failed: odd"]


def test_sums_start_without_waiting_and_are_matched_by_their_order():
    def work(transport):
        tensors = [torch.tensor([float(transport.rank + index)]) for index in range(3)]
        begun = [transport.start_all_reduce(tensor) for tensor in tensors]
        if transport.rank == 0:
            transport.exchange(
                [], [P2POp(1, torch.zeros(1))]
            )  # the other rank has started all sums
        else:
            transport.exchange([P2POp(0, torch.zeros(1))], [])
        for one in reversed(begun):
            one.wait()
        tensors[0] += 1
        begun[0].wait()
        assert all(one.finished_s is not None for one in begun)
        return [tensor.item() for tensor in tensors]

    assert run_threads(2, work) == [[2, 3, 5]] * 2


def test_a_message_of_another_size_is_refused():
    def work(transport):
        if transport.rank == 0:
            transport.exchange([P2POp(1, torch.zeros(3))], [])
        else:
            transport.exchange([], [P2POp(0, torch.zeros(2))])

    with pytest.raises(TransportError, match=r"expects \(2,\) .* which sent \(3,\)"):
        run_threads(2, work)


def test_an_emulated_link_takes_latency_plus_bytes_over_bandwidth():
    def work(transport):
        link = EmulatedLink(transport, latency_s=0.02, bytes_per_s=100_000)
        other = 1 - transport.rank
        start_s = time.monotonic()
        link.exchange([P2POp(other, torch.ones(1000))], [P2POp(other, torch.zeros(1000))])
        return time.monotonic() - start_s

    assert min(run_threads(2, work)) >= 0.06


@pytest.mark.parametrize("size", [1, 2, 5])
def test_broadcast_gives_all_ranks_the_tensors_of_rank_0(size):
    def work(transport):
        torch_types = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
        tensors_here = [torch.full((3,), transport.rank + 1).to(t) for t in torch_types]
        tensors_here.append(torch.zeros(0))
        broadcast_(tensors_here, transport)
        return [t.tolist() for t in tensors_here], broadcast_text(
            "né" * (transport.rank + 1), transport
        )

    results = run_threads(size, work)
    assert results == [results[0]] * size
    assert results[0] == ([[1, 1, 1], [1, 1, 1], [1, 1, 1], [True] * 3, []], "né")


def test_all_reduce_mean_is_the_mean_over_ranks():
    def work(transport):
        tensors_here = [
            torch.full((2,), float(transport.rank)),
            torch.tensor(transport.rank * 10.0),
        ]
        all_reduce_mean_(tensors_here, transport)
        return [t.tolist() for t in tensors_here]

    assert run_threads(3, work) == [[[1.0, 1.0], 10.0]] * 3


def threads_that_sum():
    """Return the threads of Gloo's sums in this process; other threads may come and go."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            if (task / "comm").read_text().startswith("pt_gloo"):
                found.add(task.name)
    return found


def test_a_closed_transport_leaves_no_thread_that_could_ask_for_the_gil():
    before = threads_that_sum()
    transport = open_gloo(HashStore(), rank=0, members=[0])
    transport.start_all_reduce(torch.ones(3)).wait()
    started = threads_that_sum() - before
    assert started
    transport.close()
    assert not started & threads_that_sum()
