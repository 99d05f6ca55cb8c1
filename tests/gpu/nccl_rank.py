"""One of several NCCL ranks: every algorithm on CUDA tensors, then what the test asks for."""

import os
import sys
import time

import torch

from stretto.cluster.detect import detect
from stretto.comm.algorithms import ALL_GATHER, ALLREDUCE, BROADCAST, REDUCE_SCATTER
from stretto.comm.connect import connect
from stretto.comm.courier import Courier
from stretto.comm.errand import chunk_bounds
from stretto.comm.verify import owned

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_allreduce(channel, courier):
    n = channel.size
    for name, algorithm in ALLREDUCE.items():
        for parts in (1, 3):
            for dtype in DTYPES:
                for length in (0, 1, 101, 70_001):
                    values = torch.arange(length, device="cuda") % 7
                    mine = (values + channel.rank).to(dtype)
                    errand = courier.prepare(algorithm(channel.mesh, parts), mine)
                    courier.start(errand).wait()
                    wanted = (values * n + n * (n - 1) // 2).to(dtype)
                    assert torch.equal(mine, wanted), (name, parts, dtype, length)


def check_others(channel, courier):
    n = channel.size
    for name, algorithm in REDUCE_SCATTER.items():
        mine = torch.arange(1001.0, device="cuda")
        schedule = algorithm(channel.mesh, 1)
        courier.start(courier.prepare(schedule, mine)).wait()
        bounds = chunk_bounds(1001, schedule.num_chunks)
        own = owned(schedule, channel.rank)
        place = slice(bounds[own.start], bounds[own.stop])
        assert torch.equal(mine[place], torch.arange(1001.0, device="cuda")[place] * n), name
    for name, algorithm in ALL_GATHER.items():
        schedule = algorithm(channel.mesh, 1)
        bounds = chunk_bounds(1001, schedule.num_chunks)
        mine = torch.zeros(1001, device="cuda")
        wanted = torch.zeros(1001, device="cuda")
        for rank in range(n):
            own = owned(schedule, rank)
            wanted[bounds[own.start] : bounds[own.stop]] = rank + 1
        mine[wanted == channel.rank + 1] = channel.rank + 1
        courier.start(courier.prepare(schedule, mine)).wait()
        assert torch.equal(mine, wanted), name
    for name, algorithm in BROADCAST.items():
        mine = torch.full((1001,), float(channel.rank + 5), device="cuda")
        courier.start(courier.prepare(algorithm(channel.mesh, 1), mine)).wait()
        assert mine.eq(5).all(), name


def check_many_in_flight(channel, courier):
    """Several errands queued behind a long kernel on the current stream, in one order."""
    a = torch.randn(4096, 4096, device="cuda")
    words = [("ring", 2), ("hierarchical", 4), ("native", 1), ("doubling", 1), ("double-tree", 2)]
    tensors = [torch.zeros(50_000 + i, device="cuda") for i in range(20)]
    schedules = [ALLREDUCE[name](channel.mesh, parts) for name, parts in words * 4]
    errands = courier.prepare_all(schedules, tensors)
    under_way = []
    for i, (tensor, errand) in enumerate(zip(tensors, errands, strict=True)):
        a = (a @ a).clamp(-1, 1)  # the tensor is ready only after this
        tensor.fill_(channel.rank + i)
        under_way.append(courier.start(errand))
    for pending in under_way:
        pending.wait()
    n = channel.size
    for i, tensor in enumerate(tensors):
        assert tensor.eq(n * (n - 1) // 2 + n * i).all(), i


def check_no_allocation(channel, courier):
    mine = torch.zeros(1_000_000, device="cuda")
    errand = courier.prepare(ALLREDUCE["hierarchical"](channel.mesh, 4), mine)
    courier.start(errand).wait()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        courier.start(errand).wait()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def main() -> None:
    what = sys.argv[1]
    world = detect()
    channel = connect(world, 20.0, device="cuda")
    courier = Courier(channel)
    if what == "laws":
        for check in (check_allreduce, check_others, check_many_in_flight, check_no_allocation):
            began_s = time.monotonic()
            check(channel, courier)
            torch.cuda.synchronize()
            if channel.rank == 0:
                print(f"{check.__name__} held in {time.monotonic() - began_s:.1f} s", flush=True)
    else:
        mine = torch.zeros(1_000_000, device="cuda")
        errand = courier.prepare(ALLREDUCE["ring"](channel.mesh, 2), mine)
        courier.start(errand).wait()
        torch.cuda.synchronize()
        if channel.rank == 1:
            os._exit(9)
        courier.start(errand).wait()
        torch.cuda.synchronize()
        raise AssertionError("a sum without rank 1 came to its end")
    courier.close()
    channel.close()
    if channel.rank == 0:
        print("all held", flush=True)


if __name__ == "__main__":
    main()
