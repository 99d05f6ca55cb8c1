"""Ranks as threads and the wrappers around a channel; processes are in tests/multi."""

import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from stretto.comm.channel import Parcel
from stretto.comm.emulated import EmulatedLink
from stretto.comm.gloo import open_channel
from stretto.comm.local import run_local
from stretto.comm.spread import average_, spread_from_rank_0_, spread_text
from stretto.errors import ChannelError


def test_messages_between_two_ranks_arrive_in_order():
    def work(channel):
        if channel.rank == 0:
            for value in range(5):
                channel.exchange([Parcel(1, torch.tensor([float(value)]))], [])
            return []
        got = []
        for _ in range(5):
            room = torch.zeros(1)
            channel.exchange([], [Parcel(0, room)])
            got.append(room.item())
        return got

    assert run_local(2, work)[1] == [0, 1, 2, 3, 4]


def test_lanes_do_not_mix():
    def work(channel):
        if channel.rank == 0:
            first, second = torch.tensor([1.0]), torch.tensor([2.0])
            channel.exchange([Parcel(1, first, lane=0), Parcel(1, second, lane=1)], [])
            return None
        rooms = torch.zeros(1), torch.zeros(1)
        channel.exchange([], [Parcel(0, rooms[1], lane=1), Parcel(0, rooms[0], lane=0)])
        return [room.item() for room in rooms]

    assert run_local(2, work)[1] == [1.0, 2.0]


def test_a_failing_rank_wakes_the_others_and_its_own_error_is_raised():
    def work(channel):
        if channel.rank == 1:
            raise ValueError("rank 1 has had enough")
        channel.exchange([], [Parcel(1, torch.zeros(1))])

    start_s = time.monotonic()
    with pytest.raises(ValueError, match="had enough"):
        run_local(3, work)
    assert time.monotonic() - start_s < 30


def test_silence_ends_in_an_error_that_names_the_peer():
    def work(channel):
        if channel.rank == 0:
            channel.exchange([], [Parcel(1, torch.zeros(1))])

    with pytest.raises(ChannelError, match=r"rank 0 waits for rank 1: no answer within 0\.2 s"):
        run_local(2, work, timeout_s=0.2)


def test_who_listens_is_patient_with_a_peer_that_has_nothing_to_say():
    def work(channel):
        room = torch.zeros(1)
        if channel.rank:
            channel.hear(Parcel(0, room, lane=1))
        else:
            time.sleep(0.3)
            channel.exchange([Parcel(1, torch.ones(1), lane=1)], [])
        return room.item()

    assert run_local(2, work, timeout_s=0.1)[1] == 1


def test_a_rank_that_fails_ends_the_wait_of_those_who_listen():
    heard = []

    def work(channel):
        if channel.rank == 0:
            raise ValueError("odd")
        try:
            channel.hear(Parcel(0, torch.zeros(1)))
        except ChannelError as failure:
            heard.append(str(failure))

    with pytest.raises(ValueError, match="odd"):
        run_local(2, work)
    assert heard == ["rank 1 waits for rank 0: rank 0 failed: odd"]


def test_sums_are_begun_without_waiting_and_belong_together_by_their_order():
    def work(channel):
        tensors = [torch.tensor([float(channel.rank + place)]) for place in range(3)]
        begun = [channel.start_all_reduce(tensor) for tensor in tensors]
        if channel.rank == 0:
            channel.exchange([], [Parcel(1, torch.zeros(1))])  # the other has begun all of them
        else:
            channel.exchange([Parcel(0, torch.zeros(1))], [])
        for one in reversed(begun):
            one.wait()
        tensors[0] += 1
        begun[0].wait()
        assert all(one.finished_s is not None for one in begun)
        return [tensor.item() for tensor in tensors]

    assert run_local(2, work) == [[2, 3, 5]] * 2


def test_a_message_of_another_size_is_refused():
    def work(channel):
        if channel.rank == 0:
            channel.exchange([Parcel(1, torch.zeros(3))], [])
        else:
            channel.exchange([], [Parcel(0, torch.zeros(2))])

    with pytest.raises(ChannelError, match=r"expects \(2,\) .* which sent \(3,\)"):
        run_local(2, work)


def test_an_emulated_link_takes_latency_plus_bytes_over_bandwidth():
    def work(channel):
        link = EmulatedLink(channel, latency_s=0.02, bytes_per_s=100_000)
        other = 1 - channel.rank
        start_s = time.monotonic()
        link.exchange([Parcel(other, torch.ones(1000))], [Parcel(other, torch.zeros(1000))])
        return time.monotonic() - start_s

    assert min(run_local(2, work)) >= 0.06


@pytest.mark.parametrize("size", [1, 2, 5])
def test_spreading_gives_everybody_what_rank_0_has(size):
    def work(channel):
        torch_types = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
        mine = [torch.full((3,), channel.rank + 1).to(t) for t in torch_types]
        mine.append(torch.zeros(0))
        spread_from_rank_0_(mine, channel)
        return [t.tolist() for t in mine], spread_text("né" * (channel.rank + 1), channel)

    results = run_local(size, work)
    assert results == [results[0]] * size
    assert results[0] == ([[1, 1, 1], [1, 1, 1], [1, 1, 1], [True] * 3, []], "né")


def test_averaging_is_the_mean_over_ranks():
    def work(channel):
        mine = [torch.full((2,), float(channel.rank)), torch.tensor(channel.rank * 10.0)]
        average_(mine, channel)
        return [t.tolist() for t in mine]

    assert run_local(3, work) == [[[1.0, 1.0], 10.0]] * 3


def threads_that_sum():
    """Return the threads of Gloo's sums in this process; those of others come and go."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if (task / "comm").read_text().startswith("pt_gloo"):
                found.add(task.name)
    return found


def test_a_closed_channel_leaves_no_thread_that_could_want_the_interpreter():
    before = threads_that_sum()
    channel = open_channel(HashStore(), rank=0, members=[0])
    channel.start_all_reduce(torch.ones(3)).wait()
    its_own = threads_that_sum() - before
    assert its_own
    channel.close()
    assert not its_own & threads_that_sum()
