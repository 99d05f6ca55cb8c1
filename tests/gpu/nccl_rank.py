"""The program of one NCCL rank of `test_nccl.py`: the laws of collectives, or a dying peer."""

import os
import sys
import time

import torch

from stretto.cluster.detect import detect_world
from stretto.collectives.algorithms import ALL_GATHER, ALLREDUCE, BROADCAST, REDUCE_SCATTER
from stretto.collectives.schedule import chunk_bounds
from stretto.collectives.verify import owned_chunks
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.connect import connect

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_allreduce(transport, executor):
    n = transport.size
    for name, algorithm in ALLREDUCE.items():
        for parts in (1, 3):
            for dtype in DTYPES:
                for length in (0, 1, 101, 70_001):
                    values = torch.arange(length, device="cuda") % 7
                    tensor = (values + transport.rank).to(dtype)
                    bound = executor.prepare(algorithm(transport.mesh, parts), tensor)
                    executor.start(bound).wait()
                    expected = (values * n + n * (n - 1) // 2).to(dtype)
                    assert torch.equal(tensor, expected), (name, parts, dtype, length)


def check_others(transport, executor):
    n = transport.size
    for name, algorithm in REDUCE_SCATTER.items():
        tensor = torch.arange(1001.0, device="cuda")
        schedule = algorithm(transport.mesh, 1)
        executor.start(executor.prepare(schedule, tensor)).wait()
        bounds = chunk_bounds(1001, schedule.num_chunks)
        own = owned_chunks(schedule, transport.rank)
        own_part = slice(bounds[own.start], bounds[own.stop])
        assert torch.equal(tensor[own_part], torch.arange(1001.0, device="cuda")[own_part] * n), (
            name
        )
    for name, algorithm in ALL_GATHER.items():
        schedule = algorithm(transport.mesh, 1)
        bounds = chunk_bounds(1001, schedule.num_chunks)
        tensor = torch.zeros(1001, device="cuda")
        expected = torch.zeros(1001, device="cuda")
        for rank in range(n):
            own = owned_chunks(schedule, rank)
            expected[bounds[own.start] : bounds[own.stop]] = rank + 1
        tensor[expected == transport.rank + 1] = transport.rank + 1
        executor.start(executor.prepare(schedule, tensor)).wait()
        assert torch.equal(tensor, expected), name
    for name, algorithm in BROADCAST.items():
        tensor = torch.full((1001,), float(transport.rank + 5), device="cuda")
        executor.start(executor.prepare(algorithm(transport.mesh, 1), tensor)).wait()
        assert tensor.eq(5).all(), name


def check_many_in_flight(transport, executor):
    """Check schedules that are queued behind long kernels on the current stream."""
    a = torch.randn(4096, 4096, device="cuda")
    algorithms = [
        ("ring", 2),
        ("hierarchical", 4),
        ("native", 1),
        ("doubling", 1),
        ("double-tree", 2),
    ]
    tensors = [torch.zeros(50_000 + i, device="cuda") for i in range(20)]
    schedules = [ALLREDUCE[name](transport.mesh, parts) for name, parts in algorithms * 4]
    bound_schedules = executor.prepare_all(schedules, tensors)
    running = []
    for i, (tensor, bound) in enumerate(zip(tensors, bound_schedules, strict=True)):
        a = (a @ a).clamp(-1, 1)  # the tensor is ready only after this kernel
        tensor.fill_(transport.rank + i)
        running.append(executor.start(bound))
    for work in running:
        work.wait()
    n = transport.size
    for i, tensor in enumerate(tensors):
        assert tensor.eq(n * (n - 1) // 2 + n * i).all(), i


def check_no_allocation(transport, executor):
    tensor = torch.zeros(1_000_000, device="cuda")
    bound = executor.prepare(ALLREDUCE["hierarchical"](transport.mesh, 4), tensor)
    executor.start(bound).wait()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        executor.start(bound).wait()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def main() -> None:
    what = sys.argv[1]
    world = detect_world()
    transport = connect(world, 20.0, device="cuda")
    executor = CollectiveExecutor(transport)
    if what == "laws":
        for check in (check_allreduce, check_others, check_many_in_flight, check_no_allocation):
            began_s = time.monotonic()
            check(transport, executor)
            torch.cuda.synchronize()
            if transport.rank == 0:
                print(f"{check.__name__} held in {time.monotonic() - began_s:.1f} s", flush=True)
    else:
        tensor = torch.zeros(1_000_000, device="cuda")
        bound = executor.prepare(ALLREDUCE["ring"](transport.mesh, 2), tensor)
        executor.start(bound).wait()
        torch.cuda.synchronize()
        if transport.rank == 1:
            os._exit(9)
        executor.start(bound).wait()
        torch.cuda.synchronize()
        raise AssertionError("a sum without rank 1 came to its end")
    executor.close()
    transport.close()
    if transport.rank == 0:
        print("all held", flush=True)


if __name__ == "__main__":
    main()
