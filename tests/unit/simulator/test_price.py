"""Prices of collectives, checked against sums made by hand."""

import numpy as np
import pytest

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import ALLREDUCE
from stretto.collectives.schedule import Action, Op, Schedule
from stretto.errors import ConfigError, ScheduleError
from stretto.simulator import Cluster, Cpu, LinkCosts, predict_timelines, price, serial_steps
from stretto.simulator.expanded_schedule import expand, host_symmetry, program_symmetry
from stretto.simulator.price import shortened_schedules

LINE = LinkCosts(latency_s=1.0, bytes_per_s=100.0)
QUICK = LinkCosts(latency_s=0.5, bytes_per_s=1000.0)


def cluster(shape, **cpu):
    return Cluster(ranks_per_host=shape, between=LINE, inside=QUICK, cpu=Cpu(**cpu))


def schedule(*programs, chunks=1):
    return Schedule("made up", len(programs), chunks, lambda rank: programs[rank])


def send(peer, **more):
    return Op(Action.SEND, peer, 0, 1, **more)


def add(peer, **more):
    return Op(Action.ADD, peer, 0, 1, **more)


def copy(peer, **more):
    return Op(Action.COPY, peer, 0, 1, **more)


def seconds(made, num_bytes, where):
    return price(made, num_bytes, where).seconds


def test_a_message_takes_its_latency_and_then_its_bytes():
    one_way = schedule((send(1),), (copy(0),))
    assert seconds(one_way, 400, cluster((1, 1))) == pytest.approx(1 + 4)
    assert seconds(one_way, 400, cluster((2,))) == pytest.approx(0.5 + 0.4)


def test_received_data_is_added_after_all_messages_of_the_round():
    both = schedule((add(1), add(2)), (send(0),), (send(0),))
    where = cluster((1, 1, 1), s_per_byte_added=0.01, cores=4)
    # Both share the link into host 0: 1 + 2 * 4 s; then 800 bytes are added by one core.
    assert seconds(both, 400, where) == pytest.approx(1 + 8 + 8)


def test_a_message_starts_when_both_ends_are_there():
    # Rank 2 receives from rank 1 only after it has received from rank 0.
    late = schedule((send(2),), (send(2),), (copy(0), copy(1, after=(0,))))
    assert seconds(late, 400, cluster((1, 1, 1))) == pytest.approx(2 * 5)


def test_lanes_run_concurrently_and_share_the_link():
    lanes = schedule((send(1),), (copy(0), send(2, lane=1)), (copy(1, lane=1),), chunks=1)
    assert seconds(lanes, 400, cluster((1, 2))) == pytest.approx(1 + 4)
    # The first messages of a rank's lanes start in turn; later ones share the link.
    two = schedule((send(1), send(1, lane=1)), (copy(0), copy(0, lane=1)), chunks=1)
    assert seconds(two, 400, cluster((1, 1))) == pytest.approx(2 * (1 + 4))


def test_both_directions_of_a_link_are_used_at_once():
    swap = schedule((send(1), add(1)), (send(0), add(0)))
    assert seconds(swap, 400, cluster((1, 1))) == pytest.approx(1 + 4)


def test_a_thread_gives_its_rank_one_core_for_all_its_messages():
    # Half of 0.04 core-seconds per byte at either end: 8 s for each of two messages on a thread.
    swap = schedule((send(1), add(1)), (send(0), add(0)))
    priced = price(swap, 400, cluster((1, 1), s_per_byte_between=0.04, cores=4))
    assert priced.seconds == pytest.approx(1 + 16)
    assert priced.core_s == pytest.approx(32)
    assert priced.bottleneck == "I/O thread of a rank"


def test_hosts_that_share_one_machine_share_its_cores():
    swap = schedule((send(1), add(1)), (send(0), add(0)))
    separate = cluster((1, 1), s_per_byte_between=0.04, cores=1)
    shared = cluster((1, 1), s_per_byte_between=0.04, cores=1, pool="shared")
    assert seconds(swap, 400, separate) == pytest.approx(1 + 16)
    priced = price(swap, 400, shared)
    assert priced.seconds == pytest.approx(1 + 32)
    assert priced.bottleneck == "cores"


def test_every_message_costs_core_seconds():
    one_way = schedule((send(1),), (copy(0),))
    assert seconds(one_way, 4, cluster((1, 1), s_per_message=6.0)) == pytest.approx(1 + 3)


def test_the_native_all_reduce_has_an_additional_latency():
    where = cluster((1, 1, 1))
    slow = where.model_copy(update={"native_latency_s": 0.25})
    ring, native = (ALLREDUCE[name](where.mesh, 1) for name in ("ring", "native"))
    assert seconds(native, 300, slow) == pytest.approx(seconds(ring, 300, where) + 0.25)
    assert seconds(ring, 300, slow) == seconds(ring, 300, where)
    priced = price(native, 300, slow)
    assert sum(priced.breakdown_s.values()) == pytest.approx(priced.seconds)


def test_empty_chunks_are_not_sent():
    # One element among four ranks: in each step only one rank has something to pass on.
    where = cluster((1,) * 4, s_per_message=0.1)
    priced = price(ALLREDUCE["ring"](where.mesh, 1), 4, where)
    assert priced.core_s == pytest.approx(6 * 0.1)
    assert priced.bytes_per_link == pytest.approx(2 * 4)


def test_an_empty_round_still_keeps_the_order():
    # One element in two chunks: the middle round of rank 0 has nothing to move.
    first = (add(1), Op(Action.SEND, 1, 1, 2, after=(0,)), send(1, after=(1,)))
    second = (send(0), Op(Action.COPY, 0, 1, 2, after=(0,)), copy(0, after=(1,)))
    two_ways = schedule(first, second, chunks=2)
    assert seconds(two_ways, 4, cluster((1, 1))) == pytest.approx(2 * (1 + 0.04))


def test_latency_is_the_bottleneck_of_small_messages():
    where = cluster((1,) * 4)
    assert price(ALLREDUCE["ring"](where.mesh, 1), 16, where).bottleneck == "latency"
    assert price(ALLREDUCE["ring"](where.mesh, 1), 10**6, where).bottleneck == "link between hosts"


def test_a_schedule_for_other_ranks_is_refused():
    with pytest.raises(ConfigError, match=r"made for 3 ranks, .* has 2"):
        price(ALLREDUCE["ring"](Mesh((1,) * 3), 1), 4, cluster((1, 1)))


def test_a_send_without_a_receive_is_refused():
    with pytest.raises(ScheduleError, match="do not match"):
        price(schedule((send(1),), ()), 4, cluster((1, 1)))


def test_a_timeline_shows_messages_and_additions():
    first, second = predict_timelines(
        schedule((send(1),), (add(0),)), 400, cluster((2,), s_per_byte_added=1)
    )
    assert [(s.name, s.lane, s.end_s, s.num_bytes) for s in first.spans] == [
        ("send to rank 1", "out, inside a host", pytest.approx(0.9), 400)
    ]
    assert [(s.name, s.start_s, s.end_s) for s in second.spans] == [
        ("receive from rank 0", 0, pytest.approx(0.9)),
        ("add", pytest.approx(0.9), pytest.approx(400.9)),
    ]


@pytest.mark.parametrize(
    ("name", "shape", "representatives"),
    [
        ("ring", (1,) * 12, 1),
        ("ring", (4,) * 3, 4),
        ("torus", (2,) * 6, 2),
        ("torus", (4,) * 3, 1),
        ("torus", (1,) * 12, 1),
        ("torus", (16,), 4),
        ("masters", (4,) * 3, 4),
        ("hierarchical", (4,) * 3, 1),
        ("hierarchical", (4, 3, 4), 11),
        ("hierarchical-halving", (4,) * 3, 3),
        ("ring", (5, 7), 12),
        ("doubling", (1,) * 12, 12),
    ],
)
def test_symmetry_and_hosts_determine_the_number_of_representatives(name, shape, representatives):
    mesh = Mesh(shape)
    symmetry = host_symmetry(ALLREDUCE[name](mesh, 1), mesh)
    assert symmetry.num_representatives == len(symmetry.ranks) == representatives
    assert symmetry.ranks_represented * representatives == mesh.size


def test_few_rounds_of_a_long_ring_are_kept():
    schedule = ALLREDUCE["ring"](Mesh((1,) * 1000), 1)
    expanded = expand(schedule, program_symmetry(schedule))
    shortened = next(shortened_schedules(expanded))
    assert len(shortened.expanded.rounds) < 200 < len(expanded.rounds)
    assert len(shortened.expanded.rounds) + sum(count for _, count in shortened.gaps) == len(
        expanded.rounds
    )


def test_rounds_are_not_left_out_without_a_steady_state():
    ring = ALLREDUCE["ring"](Mesh((1,) * 1000), 1)
    shortened = next(shortened_schedules(expand(ring, program_symmetry(ring))))
    times = np.cumsum(np.arange(len(shortened.expanded.rounds), dtype=np.float64))
    assert shortened.skipped_s(times) is None
    assert shortened.skipped_s(np.arange(len(times), dtype=np.float64)) == sum(
        n for _, n in shortened.gaps
    )


def test_a_steady_state_may_alternate_between_two_rounds():
    ring = ALLREDUCE["ring"](Mesh((1,) * 1000), 1)
    shortened = next(shortened_schedules(expand(ring, program_symmetry(ring))))
    times = np.cumsum(np.resize([1.0, 3.0], len(shortened.expanded.rounds)))
    assert shortened.skipped_s(times) == pytest.approx(
        2 * sum(count for _, count in shortened.gaps)
    )


def test_serial_steps_count_the_messages_of_a_round_one_by_one_at_each_rank():
    star = schedule((copy(1), copy(2), copy(3)), (send(0),), (send(0),), (send(0),))
    assert serial_steps(star) == 3
    pair = schedule((send(1), copy(1)), (send(0), copy(0)))
    assert serial_steps(pair) == 1
    lanes = schedule((send(1), send(1, lane=1)), (copy(0), copy(0, lane=1)))
    assert serial_steps(lanes) == 2
