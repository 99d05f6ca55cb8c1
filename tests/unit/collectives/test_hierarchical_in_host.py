"""Collectives of hybrid sharding: every host has the whole tensor, divided among its ranks."""

from dataclasses import replace

import pytest
import torch

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import host_all_gather, host_reduce_scatter
from stretto.collectives.schedule import Action, chain_programs, chunk_bounds, rounds
from stretto.collectives.verify import (
    owned_chunks,
    verify_all_gather,
    verify_allreduce,
    verify_reduce_scatter,
)
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.in_process_transports import run_threads
from stretto.errors import ScheduleError
from stretto.simulator import Cluster, Cpu, LinkCosts, price

MESHES = [Mesh((k,) * m) for m, k in [(1, 1), (1, 4), (2, 2), (3, 2), (4, 1), (2, 4)]]
for_every_mesh = pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: mesh.shape)
for_both = pytest.mark.parametrize("collective", [host_reduce_scatter, host_all_gather])


def scatter_then_gather(mesh, parts):
    scatter, gather = host_reduce_scatter(mesh, parts), host_all_gather(mesh, parts)
    assert scatter.num_chunks == gather.num_chunks
    return replace(scatter, program=lambda r: chain_programs(scatter.program(r), gather.program(r)))


@for_every_mesh
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_reduce_scatter_then_all_gather_is_an_all_reduce(mesh, parts):
    verify_allreduce(scatter_then_gather(mesh, parts))


@for_every_mesh
@pytest.mark.parametrize("parts", [1, 3])
def test_all_ranks_end_with_the_same_bits_whatever_the_length(mesh, parts):
    schedule = scatter_then_gather(mesh, parts)

    def work(transport):
        results = []
        with CollectiveExecutor(transport) as executor:
            for length in (0, 1, 5, 1001):
                generator = torch.manual_seed(7 * length + transport.rank)
                results.append(torch.randn(length, generator=generator))
                executor.run(executor.prepare(schedule, results[-1]))
        return torch.cat(results)

    results = run_threads(mesh.size, work)
    assert all(torch.equal(result, results[0]) for result in results)


@for_every_mesh
def test_a_rank_owns_one_range_which_is_the_same_on_every_host(mesh):
    k = mesh.ranks_per_host[0]
    schedule = host_reduce_scatter(mesh, 2)
    assert schedule.num_chunks == 2 * mesh.size
    bounds = chunk_bounds(schedule.num_chunks * 3, schedule.num_chunks)
    for rank in range(mesh.size):
        own = owned_chunks(schedule, rank, k)
        local_rank = rank % k
        assert (bounds[own.start], bounds[own.stop]) == (
            local_rank * bounds[-1] // k,
            (local_rank + 1) * bounds[-1] // k,
        )


@for_every_mesh
@pytest.mark.parametrize("parts", [1, 3])
def test_only_the_reduce_scatter_sends_between_hosts_and_only_own_chunks(mesh, parts):
    k = mesh.ranks_per_host[0]
    gather, scatter = host_all_gather(mesh, parts), host_reduce_scatter(mesh, parts)
    for rank in range(mesh.size):
        host, own = mesh.host_of(rank), owned_chunks(scatter, rank, k)
        assert all(mesh.host_of(op.peer) == host for op in gather.program(rank))
        away = [op for op in scatter.program(rank) if mesh.host_of(op.peer) != host]
        assert all(own.start <= op.start < op.stop <= own.stop for op in away)
        leaving = sum(op.stop - op.start for op in away if op.action is Action.SEND)
        assert leaving * mesh.hosts == 2 * (mesh.hosts - 1) * len(own)


def test_a_part_is_summed_inside_hosts_while_the_one_before_is_between_hosts():
    schedule = host_reduce_scatter(Mesh((3, 3)), 2)
    lanes = {batch.lane: [] for batch in rounds(schedule, 0)}
    for batch in rounds(schedule, 0):
        lanes[batch.lane].append(batch.waits_for)
    inside, between = lanes[0], lanes[1]
    assert inside == [()] * 4  # two rounds of each part, which wait for nothing between hosts
    assert [bool(waits_for) for waits_for in between] == [True, False, True, False]


@pytest.mark.parametrize(
    ("mesh", "parts", "lanes"), [((4,), 3, 2), ((1, 1, 1), 3, 2), ((4,), 1, 1)]
)
def test_parts_of_a_single_phase_use_two_lanes(mesh, parts, lanes):
    used = {op.lane for op in host_reduce_scatter(Mesh(mesh), parts).program(0)}
    assert used == set(range(lanes))


def test_all_lanes_in_use_are_reserved_whichever_schedule_is_prepared_last():
    mesh = Mesh((2, 2))
    schedules = [host_reduce_scatter(mesh), host_all_gather(mesh)]

    def work(transport):
        reserved = []
        transport.reserve = reserved.append
        with CollectiveExecutor(transport) as executor:
            executor.prepare_all(schedules, [torch.zeros(8), torch.zeros(8)])
        return reserved

    assert run_threads(mesh.size, work) == [[2]] * mesh.size


@for_both
def test_hosts_of_different_size_are_refused_with_advice(collective):
    with pytest.raises(ScheduleError, match=r"hosts have 3, 1 ranks; .* among all ranks instead"):
        collective(Mesh((3, 1)))


def test_verification_refuses_an_impossible_number_of_shards():
    schedule = host_reduce_scatter(Mesh((2, 2)))
    for verify in (verify_reduce_scatter, verify_all_gather):
        with pytest.raises(ScheduleError, match="cannot be divided among every 3 ranks"):
            verify(schedule, 3)


def test_a_sum_that_stays_inside_hosts_is_refused():
    schedule = host_reduce_scatter(Mesh((2, 2)))
    inside = replace(schedule, program=lambda r: schedule.program(r)[:2])
    with pytest.raises(ScheduleError, match="chunk 0 of rank 0 holds the input of rank 2 0 times"):
        verify_reduce_scatter(inside, 2)


def test_a_gather_over_all_ranks_is_no_gather_inside_hosts():
    gather = host_all_gather(Mesh((4,)))
    verify_all_gather(gather)
    with pytest.raises(ScheduleError, match="holds the input"):
        verify_all_gather(gather, 2)


COSTLY = Cpu(cores=2, s_per_byte_between=3e-9, s_per_message=2e-5, s_per_byte_added=1e-9)
FREE = Cpu(cores=64, s_per_byte_added=1e-9)


def cluster(mesh, cpu):
    return Cluster(
        ranks_per_host=mesh.ranks_per_host,
        between=LinkCosts(latency_s=1e-4, bytes_per_s=1e8),
        inside=LinkCosts(latency_s=1e-5, bytes_per_s=1e9),
        cpu=cpu,
    )


@for_both
@for_every_mesh
def test_a_price_by_representatives_is_the_price_of_all(collective, mesh):
    where = cluster(mesh, COSTLY)
    for parts in (1, 3):
        schedule = collective(mesh, parts)
        for num_bytes in (40, 4_000_000):
            by_some = price(schedule, num_bytes, where)
            by_all = price(replace(schedule, period=None, rotation_block=None), num_bytes, where)
            assert by_some.seconds == pytest.approx(by_all.seconds, rel=1e-9)
            assert by_some.bytes_per_link == pytest.approx(by_all.bytes_per_link, rel=1e-9)


@for_every_mesh
def test_a_price_equals_the_formulas(mesh):
    k, m, num_bytes = mesh.ranks_per_host[0], mesh.hosts, 720_720 * 4
    around = (k - 1) * 1e-5 + (k - 1) / k * num_bytes / 1e9
    between = 2 * (m - 1) * 1e-4 + 2 * (m - 1) / m * num_bytes / 1e8
    added = ((k - 1) / k + (m - 1) / m / k) * num_bytes * 1e-9
    where = cluster(mesh, FREE)
    gather = price(host_all_gather(mesh), num_bytes, where)
    scatter = price(host_reduce_scatter(mesh), num_bytes, where)
    assert gather.seconds == pytest.approx(around, rel=1e-9)
    assert scatter.seconds == pytest.approx(around + between + added, rel=1e-9)
    assert gather.bytes_per_link == 0


def test_ten_thousand_ranks_are_all_represented():
    mesh = Mesh((8,) * 1250)
    scatter = price(host_reduce_scatter(mesh), 10**8, cluster(mesh, COSTLY))
    gather = price(host_all_gather(mesh), 10**8, cluster(mesh, COSTLY))
    assert scatter.ranks_represented == gather.ranks_represented == mesh.size
