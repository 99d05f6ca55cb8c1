"""Orders of operations are possible for real ranks, and peers are uniformly random."""

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.topology.adpsgd_pairs import (
    OperationKind,
    is_active,
    passive_peer,
    random_operation_order,
)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 7), steps=st.integers(0, 6), seed=st.integers(0, 2**64))
def test_every_order_of_a_worker_is_possible_for_a_real_one(size, steps, seed):
    done = defaultdict(list)
    for operation in random_operation_order(size, steps, seed):
        done[operation.worker, operation.kind].append(operation.step)
        read, applied, averaged = (len(done[operation.worker, kind]) for kind in OperationKind)
        assert applied <= read <= applied + 1
        if is_active(operation.worker) and size > 1:
            assert averaged <= applied
            assert read <= averaged + 2, "averaging ends before the next step but one begins"
        assert (operation.peer != operation.worker) == (operation.kind is OperationKind.AVERAGE)
    for worker in range(size):
        averages = steps if is_active(worker) and size > 1 else 0
        assert (
            done[worker, OperationKind.READ]
            == done[worker, OperationKind.APPLY]
            == list(range(steps))
        )
        assert done[worker, OperationKind.AVERAGE] == list(range(averages))


def test_an_active_worker_averages_with_the_peer_of_a_real_rank():
    for operation in random_operation_order(5, 20, seed=3):
        if operation.kind is OperationKind.AVERAGE:
            assert operation.peer == passive_peer(operation.worker, 5, operation.step, seed=3)


def test_operations_of_a_worker_appear_in_both_orders():
    seen = {
        (before.kind, after.kind)
        for seed in range(8)
        for operations in [
            [operation for operation in random_operation_order(2, 8, seed) if operation.worker == 0]
        ]
        for before, after in pairwise(operations)
    }
    assert {
        (OperationKind.AVERAGE, OperationKind.APPLY),
        (OperationKind.APPLY, OperationKind.AVERAGE),
        (OperationKind.READ, OperationKind.AVERAGE),
    } <= seen


@pytest.mark.parametrize(("size", "passive"), [(2, [1]), (3, [1]), (8, [1, 3, 5, 7])])
def test_peers_are_passive_and_equally_likely(size, passive):
    drawn = Counter(passive_peer(0, size, step) for step in range(4000))
    assert sorted(drawn) == passive
    assert min(drawn.values()) > 0.9 * 4000 / len(passive)


def test_peers_are_drawn_by_rank_seed_and_step():
    def peers(rank, seed):
        return [passive_peer(rank, 16, step, seed) for step in range(20)]

    assert peers(0, 1) != peers(2, 1)
    assert peers(0, 1) != peers(0, 2)
    assert passive_peer(0, 1, 0) is None
    assert passive_peer(3, 4, 0) is None, "a passive rank contacts nobody"


def test_a_worker_of_a_low_relative_speed_is_slow():
    operations = list(random_operation_order(4, 50, seed=1, relative_speeds=(20, 1, 20, 20)))
    last = {operation.worker: index for index, operation in enumerate(operations)}
    others = max(index for worker, index in last.items() if worker != 1)
    before = sum(e.kind is OperationKind.APPLY for e in operations[:others] if e.worker == 1)
    assert before < 25


@pytest.mark.parametrize("max_lead", [1, 3])
def test_no_worker_begins_a_step_too_far_ahead_of_the_slowest(max_lead):
    begun = [7] * 4
    operations = list(random_operation_order(4, 40, 2, (1, 9, 9, 9), first=7, max_lead=max_lead))
    for operation in operations:
        if operation.kind is OperationKind.READ:
            assert operation.step == begun[operation.worker] < min(begun) + max_lead
            begun[operation.worker] += 1
    assert begun == [47] * 4
    free = list(random_operation_order(4, 40, 2, (1, 9, 9, 9), first=7))
    assert sorted(free) == sorted(operations)
    assert free != operations


def test_a_later_first_step_gives_another_order_and_other_peers():
    shapes = [
        [(e.kind, e.worker) for e in random_operation_order(4, 6, 1, first=first)]
        for first in (0, 6, 12)
    ]
    assert shapes[0] != shapes[1] != shapes[2]
    for operation in random_operation_order(4, 6, 1, first=6):
        if operation.kind is OperationKind.AVERAGE:
            assert operation.peer == passive_peer(operation.worker, 4, operation.step, 1)
