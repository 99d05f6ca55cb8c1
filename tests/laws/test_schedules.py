"""Laws of every collective in the tables: correctness, number of steps, symmetry."""

import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import (
    ALL_GATHER,
    ALLREDUCE,
    BROADCAST,
    HOST_ALL_GATHER,
    HOST_REDUCE_SCATTER,
    REDUCE_SCATTER,
    double_tree,
    hierarchical_reduce_scatter,
)
from stretto.collectives.schedule import Action, chunk_bounds, pipeline_tensor, rounds
from stretto.collectives.verify import (
    owned_chunks,
    verify_all_gather,
    verify_allreduce,
    verify_broadcast,
    verify_reduce_scatter,
)
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.in_process_transports import run_threads
from stretto.errors import ScheduleError

TABLES = {
    "all-reduce": (ALLREDUCE, verify_allreduce),
    "reduce-scatter": (REDUCE_SCATTER, verify_reduce_scatter),
    "all-gather": (ALL_GATHER, verify_all_gather),
    "host-reduce-scatter": (HOST_REDUCE_SCATTER, verify_reduce_scatter),
    "host-all-gather": (HOST_ALL_GATHER, verify_all_gather),
    "broadcast": (BROADCAST, verify_broadcast),
}
CASES = [(kind, name) for kind, (table, _) in TABLES.items() for name in table]
for_every_collective = pytest.mark.parametrize(
    ("kind", "name"), CASES, ids=[f"{name}-{kind}" for kind, name in CASES]
)

ALL_SIZES = [*range(1, 34), 48, 63, 64]
FEW_SIZES = [*range(1, 18), 24, 31, 33, 64]
LINEAR = ["native", "ring", "scatter-gather"]
"""These take n steps or more, so their verification costs n squared."""

EVEN = [Mesh((5,)), Mesh((2, 2)), Mesh((1, 1, 1, 1)), Mesh((4, 4)), Mesh((2, 2, 2))]
UNEVEN = [Mesh((3, 1, 4)), Mesh((1, 4)), Mesh((5, 2))]


def flat(size):
    return Mesh((size,))


def square(size):
    """Return a mesh with about as many hosts as ranks on each, to use links inside and between."""
    return Mesh((rows(size),) * (size // rows(size)))


def rows(size):
    """Return the number of rows of the grid nearest to a square."""
    return max(x for x in range(1, size + 1) if size % x == 0 and x * x <= size)


def meshes_for(kind, name):
    # These refuse hosts of different size (see below), because rank r must own chunk r.
    refuses = name == "hierarchical" and kind in ("reduce-scatter", "all-gather")
    return EVEN if refuses or kind.startswith("host-") else EVEN + UNEVEN


def shards_of(kind, mesh):
    """Return the number of consecutive ranks that divide the tensor."""
    return mesh.ranks_per_host[0] if kind.startswith("host-") else mesh.size


def verify_collective(kind, name, mesh, parts):
    table, verify = TABLES[kind]
    schedule = table[name](mesh, parts)
    if kind.endswith(("scatter", "gather")):
        verify(schedule, shards_of(kind, mesh))
    else:
        verify(schedule)


@for_every_collective
def test_every_rank_ends_with_the_right_inputs_exactly_once(kind, name):
    for size in FEW_SIZES if name in LINEAR else ALL_SIZES:
        verify_collective(kind, name, square(size), 1)


@for_every_collective
def test_the_same_holds_with_pipelined_parts(kind, name):
    for size in [*range(1, 10), 16, 17]:
        verify_collective(kind, name, square(size), 3)


@for_every_collective
def test_the_same_holds_on_any_mesh(kind, name):
    for mesh in [*meshes_for(kind, name), Mesh((1,) * 9)]:
        verify_collective(kind, name, mesh, 1)
        verify_collective(kind, name, mesh, 3)
    for mesh in (Mesh((8,) * 4), Mesh((4,) * 6)):
        verify_collective(kind, name, mesh, 3)


@pytest.mark.parametrize("mesh", UNEVEN, ids=str)
def test_uneven_hosts_are_refused_with_advice_where_they_cannot_work(mesh):
    with pytest.raises(ScheduleError, match="use ring or halving instead"):
        hierarchical_reduce_scatter(mesh)


# --- executed, with ranks as threads ---


@dataclass(frozen=True)
class Outcome:
    kind: str
    schedule: object
    shards: int
    inputs: torch.Tensor
    results: torch.Tensor

    def own(self, rank):
        bounds = chunk_bounds(self.inputs.shape[1], self.schedule.num_chunks)
        chunks = owned_chunks(self.schedule, rank, self.shards)
        return slice(bounds[chunks.start], bounds[chunks.stop])

    def pairs(self):
        """Return pairs (result, expected) of the parts that the collective defines."""
        total = self.inputs.double().sum(dim=0).to(self.inputs.dtype)
        ranks = range(self.schedule.size)
        if self.kind.endswith("reduce-scatter"):
            return [(self.results[r][self.own(r)], total[self.own(r)]) for r in ranks]
        if self.kind.endswith("all-gather"):
            tensors_here = [self.inputs[r][self.own(r)] for r in ranks]
            first = [r - r % self.shards for r in ranks]
            expected = [torch.cat(tensors_here[f : f + self.shards]) for f in first]
            return list(zip(self.results, expected, strict=True))
        if self.kind == "broadcast":
            total = self.inputs[0]
        return [(self.results[r], total) for r in ranks]


def execute_all(kind, name, mesh, parts, inputs):
    """Yield the outcome for each of ``inputs``, [rank, element], from one group of threads."""
    schedule = TABLES[kind][0][name](mesh, parts)

    def work(transport):
        tensors_here = [tensor[transport.rank].clone() for tensor in inputs]
        with CollectiveExecutor(transport) as executor:
            for tensor in tensors_here:
                executor.run(executor.prepare(schedule, tensor))
        return tensors_here

    results = run_threads(mesh.size, work)
    for index, tensor in enumerate(inputs):
        stacked = torch.stack([result[index] for result in results])
        yield Outcome(kind, schedule, shards_of(kind, mesh), tensor, stacked)


def whole_numbers(size, length, dtype=torch.float32):
    """Return integers so small that their sums are exact in every type."""
    generator = torch.manual_seed(size * 1000 + length)
    return torch.randint(-3, 4, (size, length), generator=generator).to(dtype)


def random_numbers(size, length, dtype):
    return torch.randn(size, length, generator=torch.manual_seed(size)).to(dtype)


@for_every_collective
def test_it_is_exact_for_any_number_of_ranks(kind, name):
    for size in range(1, 18):
        (outcome,) = execute_all(kind, name, square(size), 1, [whole_numbers(size, 101)])
        assert all(torch.equal(result, expected) for result, expected in outcome.pairs()), size


@for_every_collective
def test_it_is_exact_on_any_hosts_in_three_parts(kind, name):
    for mesh in meshes_for(kind, name):
        inputs = [whole_numbers(mesh.size, length) for length in (1, 101)]
        for outcome in execute_all(kind, name, mesh, 3, inputs):
            assert all(torch.equal(result, expected) for result, expected in outcome.pairs()), mesh


TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@for_every_collective
def test_it_is_exact_in_every_type_and_length(kind, name):
    mesh = Mesh((2, 2, 2))
    inputs = [whole_numbers(mesh.size, n, dtype) for dtype in TYPES for n in (0, 1, 101, 70_001)]
    for outcome in execute_all(kind, name, mesh, 3, inputs):
        assert all(torch.equal(result, expected) for result, expected in outcome.pairs())


@pytest.mark.parametrize("mesh", [Mesh((7,)), Mesh((3, 1, 4))], ids=str)
@pytest.mark.parametrize("name", ALLREDUCE)
def test_a_sum_has_the_same_bits_on_every_rank_and_every_time(name, mesh):
    inputs = [random_numbers(mesh.size, 1001, dtype) for dtype in [*TYPES, TYPES[0]]]
    outcomes = list(execute_all("all-reduce", name, mesh, 3, inputs))
    for outcome in outcomes:
        assert all(torch.equal(row, outcome.results[0]) for row in outcome.results)
    assert torch.equal(outcomes[0].results, outcomes[-1].results)
    total = inputs[0].sum(dim=0)
    torch.testing.assert_close(outcomes[0].results[0], total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ALLREDUCE)
def test_a_mean_is_the_sum_divided_once(name):
    mesh = Mesh((3, 3))
    (outcome,) = execute_all("all-reduce", name, mesh, 1, [whole_numbers(6, 101)])
    expected = outcome.inputs.sum(dim=0) / mesh.size
    assert all(torch.equal(row / mesh.size, expected) for row in outcome.results)


# --- counted, as in the papers ---


def serial_steps(schedule):
    """Return the number of ticks of a schedule.

    A message takes one tick once both its ends are posted. Lanes run concurrently, and so do the
    messages of a round.
    """
    todo = [
        {lane: [i for i, r in enumerate(own) if r.lane == lane] for lane in {r.lane for r in own}}
        for own in (rounds(schedule, rank) for rank in range(schedule.size))
    ]
    done = [set() for _ in todo]
    posted, message_index, running = Counter(), {}, {}
    ticks = 0
    while any(any(lanes.values()) for lanes in todo):
        for rank, lanes in enumerate(todo):
            for index in [queue[0] for queue in lanes.values() if queue]:
                batch = rounds(schedule, rank)[index]
                if (rank, index) in running or not done[rank].issuperset(batch.waits_for):
                    continue
                running[rank, index] = batch
                for op in batch.ops:
                    end = (rank, op.peer, op.lane, op.action is Action.SEND)
                    message_index[rank, index, id(op)] = posted[end]
                    posted[end] += 1
        over = [
            (rank, index)
            for (rank, index), batch in running.items()
            if all(
                posted[op.peer, rank, op.lane, op.action is not Action.SEND]
                > message_index[rank, index, id(op)]
                for op in batch.ops
            )
        ]
        assert over, "deadlock"
        for rank, index in over:
            done[rank].add(index)
            todo[rank][running.pop((rank, index)).lane].pop(0)
        ticks += 1
    return ticks


def log2(size):
    """Return the logarithm, rounded up."""
    return (size - 1).bit_length()


def folds(size):
    """Return the logarithm, rounded down, and 2 more messages if ``size`` is no power of two."""
    return size.bit_length() - 1, 2 * (size & (size - 1) != 0)


STEPS = {
    ("all-reduce", "native"): lambda n, k, m: 2 * (n - 1),
    ("all-reduce", "gather-broadcast"): lambda n, k, m: 2 * (n - 1),
    ("all-reduce", "binomial"): lambda n, k, m: 2 * log2(n),
    ("all-reduce", "doubling"): lambda n, k, m: sum(folds(n)),
    ("all-reduce", "halving-doubling"): lambda n, k, m: 2 * folds(n)[0] + folds(n)[1],
    ("all-reduce", "binary-blocks"): lambda n, k, m: 2 * folds(n)[0] + folds(n)[1],
    ("all-reduce", "ring"): lambda n, k, m: 2 * (n - 1),
    ("all-reduce", "double-tree"): lambda n, k, m: 2 * folds(n)[0],
    ("all-reduce", "torus"): lambda n, k, m: 2 * (rows(n) + n // rows(n) - 2),
    ("all-reduce", "masters"): lambda n, k, m: 4 * (k - 1) + 2 * (m - 1),
    ("all-reduce", "hierarchical"): lambda n, k, m: 2 * (k - 1) + 2 * (m - 1),
    ("all-reduce", "hierarchical-halving"): lambda n, k, m: (
        2 * (k - 1) + 2 * folds(m)[0] + folds(m)[1]
    ),
    ("all-reduce", "hierarchical-doubling"): lambda n, k, m: 2 * (k - 1) + sum(folds(m)),
    ("reduce-scatter", "ring"): lambda n, k, m: n - 1,
    ("reduce-scatter", "halving"): lambda n, k, m: log2(n),
    ("reduce-scatter", "hierarchical"): lambda n, k, m: k - 1 + m - 1,
    ("all-gather", "ring"): lambda n, k, m: n - 1,
    ("all-gather", "doubling"): lambda n, k, m: log2(n),
    ("all-gather", "hierarchical"): lambda n, k, m: k - 1 + m - 1,
    ("host-reduce-scatter", "ring"): lambda n, k, m: k - 1 + 2 * (m - 1),
    ("host-all-gather", "ring"): lambda n, k, m: k - 1,
    ("broadcast", "binomial"): lambda n, k, m: log2(n),
    ("broadcast", "scatter-gather"): lambda n, k, m: log2(n) + n - 1 if n > 1 else 0,
}


@for_every_collective
def test_the_number_of_serial_steps_is_that_of_the_papers(kind, name):
    for k, m in [
        *((n, 1) for n in (*range(1, 18), 24, 32)),
        (2, 2),
        (4, 3),
        (3, 5),
        (1, 6),
        (2, 8),
    ]:
        schedule = TABLES[kind][0][name](Mesh((k,) * m), 1)
        assert serial_steps(schedule) == STEPS[kind, name](k * m, k, m), (k, m)


def sent(schedule, rank):
    """Return how many chunks ``rank`` sends, and in how many messages."""
    sends = [op for op in schedule.program(rank) if op.action is Action.SEND]
    return sum(op.stop - op.start for op in sends), len(sends)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 12, 16])
@pytest.mark.parametrize("name", ["ring", "torus", "hierarchical"])
def test_in_bandwidth_optimal_algorithms_every_rank_sends_two_n_minus_one_nths(name, size):
    mesh = Mesh((2,) * (size // 2)) if size % 2 == 0 else flat(size)
    schedule = ALLREDUCE[name](mesh, 1)
    for rank in range(size):
        assert sent(schedule, rank)[0] * size == 2 * (size - 1) * schedule.num_chunks


@pytest.mark.parametrize("size", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("name", ["halving-doubling", "binary-blocks"])
def test_halving_and_doubling_sends_the_bytes_of_a_ring_in_two_log_n_messages(name, size):
    schedule = ALLREDUCE[name](flat(size), 1)
    for rank in range(size):
        assert sent(schedule, rank) == (2 * (size - 1), 2 * log2(size))


@pytest.mark.parametrize("size", range(2, 34))
def test_binary_blocks_never_send_more_than_folding_does(size):
    blocks, fold = (
        ALLREDUCE[name](flat(size), 1) for name in ("binary-blocks", "halving-doubling")
    )
    most = [max(sent(s, rank)[0] for rank in range(size)) for s in (blocks, fold)]
    assert blocks.num_chunks == fold.num_chunks
    assert most[0] <= most[1]


@pytest.mark.parametrize("size", range(2, 34))
def test_in_a_double_tree_a_relay_of_one_tree_is_a_leaf_of_the_other(size):
    schedule = double_tree(size)
    trees = []
    for rank in range(size):
        adds = [op.start for op in schedule.program(rank) if op.action is Action.ADD]
        assert max(Counter(adds).values(), default=0) <= 2
        assert sent(schedule, rank)[0] <= 2 * schedule.num_chunks
        trees.append(len(set(adds)))
    assert Counter(trees) == Counter({1: size} if size % 2 == 0 else {1: size - 1, 0: 1})


@pytest.mark.parametrize("mesh", EVEN, ids=str)
def test_only_masters_send_between_hosts(mesh):
    schedule = ALLREDUCE["masters"](mesh, 2)
    for rank in range(mesh.size):
        away = [op for op in schedule.program(rank) if mesh.host_of(op.peer) != mesh.host_of(rank)]
        assert not away or rank in [mesh.ranks_on_host(host).start for host in range(mesh.hosts)]


LOGARITHMIC = ["gather-broadcast", "binomial", "doubling", "halving-doubling", "double-tree"]


@pytest.mark.parametrize("name", LOGARITHMIC)
def test_at_ten_thousand_ranks_a_program_is_still_short(name):
    schedule = ALLREDUCE[name](flat(10_000), 1)
    assert all(len(schedule.program(rank)) <= 4 * 14 for rank in range(1, 10_000, 97))


@for_every_collective
def test_period_and_rotation_block_are_symmetries(kind, name):
    for mesh in [*(flat(size) for size in (1, 2, 5, 6, 12)), *meshes_for(kind, name)]:
        for parts in (1, 3):
            schedule = TABLES[kind][0][name](mesh, parts)
            for move in moves(schedule):
                for rank in range(mesh.size):
                    there = [(op.action, op.peer, *rest) for op, rest in seen(schedule, move(rank))]
                    moved = [(o.action, move(o.peer), *rest) for o, rest in seen(schedule, rank)]
                    assert moved == there, mesh


def moves(schedule):
    """Yield the maps of ranks that the schedule declares to be symmetries."""
    n, rotation_block = schedule.size, schedule.rotation_block
    if schedule.period is not None:
        yield lambda rank: (rank + schedule.period) % n
    if rotation_block is not None:
        assert (schedule.period or 0) % rotation_block == n % rotation_block == 0
        yield lambda rank: rank - rank % rotation_block + (rank + 1) % rotation_block


def seen(schedule, rank):
    return [(op, (op.stop - op.start, op.after, op.lane)) for op in schedule.program(rank)]


def test_symmetries_are_declared():
    mesh = Mesh((3,) * 4)
    schedules = {name: algorithm(mesh, 2) for name, algorithm in ALLREDUCE.items()}
    symmetries = {
        name: (schedule.period, schedule.rotation_block) for name, schedule in schedules.items()
    }
    assert {
        name: symmetry for name, symmetry in symmetries.items() if symmetry != (None, None)
    } == {
        "native": (1, None),
        "ring": (1, None),
        "torus": (3, 3),
        "masters": (3, None),
        "hierarchical": (3, 3),
        "hierarchical-halving": (None, 3),
        "hierarchical-doubling": (None, 3),
    }


@pytest.mark.parametrize(
    ("shape", "row"),
    [
        ((1,) * 12, 3),
        ((4,) * 3, 4),
        ((2,) * 8, 4),
        ((4, 4), 2),
        ((16,), 4),
        ((8,) * 7, 8),
        ((3, 1, 4), 2),
        ((7,), 1),
    ],
)
def test_rows_of_a_torus_are_whole_hosts_or_hosts_whole_rows(shape, row):
    rotation_block = ALLREDUCE["torus"](Mesh(shape), 1).rotation_block
    assert (rotation_block or 1) == row


def test_chunks_cover_the_tensor_and_differ_by_one_at_most():
    for numel in (0, 1, 5, 17):
        for num_chunks in (1, 2, 3, 8):
            bounds = chunk_bounds(numel, num_chunks)
            sizes = [b - a for a, b in itertools.pairwise(bounds)]
            assert sum(sizes) == numel
            assert max(sizes) - min(sizes) <= 1


def test_independent_operations_share_a_round():
    batches = rounds(ALLREDUCE["ring"](flat(4), 1), 1)
    assert [len(batch.ops) for batch in batches] == [2] * 6


def test_a_part_is_summed_between_hosts_while_the_next_is_inside_hosts():
    # Three phases, the middle one of two steps: each further part adds 2 ticks, not 4.
    schedule = ALLREDUCE["hierarchical"](Mesh((2, 2)), 1)
    assert serial_steps(schedule) == 4
    assert serial_steps(pipeline_tensor(schedule, 4)) == 4 + 3 * 2
