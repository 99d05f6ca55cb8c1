"""Parcels go in the order given, what follows them included; failures come out where waited for."""

import pytest
import torch

from stretto.comm.channel import Parcel
from stretto.comm.local import local_channels, run_local
from stretto.comm.post import Post


def test_what_follows_an_exchange_has_what_arrived_and_comes_before_the_next():
    def on_rank(channel):
        post, seen = Post(channel), []
        rooms = [torch.zeros(1), torch.zeros(1)]
        for number, room in enumerate(rooms):
            told = torch.tensor([float(10 * number + channel.rank)])
            parcels = [Parcel(1 - channel.rank, told, 1)], [Parcel(1 - channel.rank, room, 1)]
            pending = post.start(*parcels, 1, lambda: seen.append([float(r) for r in rooms]))
        pending.wait()
        post.close()
        return seen

    assert run_local(2, on_rank) == [[[1.0, 0.0], [1.0, 11.0]], [[0.0, 0.0], [0.0, 10.0]]]


def test_nothing_is_carried_but_what_follows_is_done_and_its_failure_is_raised():
    post = Post(local_channels(1)[0])
    post.start([], [], 1).wait()
    pending = post.start([], [], 1, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        pending.wait()
    post.close()
