"""Expand a schedule into columns of rounds and messages, independent of the tensor's size.

Where ranks are symmetric, only representative ranks are expanded. A message to any other rank
becomes a message to its representative, which does the same at the same times.
"""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stretto.cluster.world import Mesh
from stretto.collectives.schedule import Action, Program, Schedule, rounds
from stretto.errors import ScheduleError, StrettoError
from stretto.simulator.tasks import Ints

# --- symmetry ---


@dataclass(frozen=True, slots=True)
class Symmetry:
    """Ranks that do the same at the same times: those that two kinds of permutation exchange.

    All ranks shift by ``period``, or the ranks inside every block rotate by ``stride``.
    """

    size: int
    period: int
    """Ranks at this distance are equivalent; ``size`` where no two ranks are."""
    block: int = 1
    """Ranks of a block; 1 where nothing is rotated."""
    stride: int = 1
    """Ranks at this distance in a block are equivalent."""

    @property
    def ranks(self) -> Ints:
        """Return the representative ranks."""
        every = np.arange(self.period, dtype=np.int64)
        return every[every % self.block < self.stride]

    @property
    def num_representatives(self) -> int:
        """Return the number of representative ranks."""
        return self.period // self.block * self.stride

    @property
    def ranks_represented(self) -> int:
        """Return how many ranks each representative stands for."""
        return self.size // self.num_representatives

    def ranks_represented_on_host(self, ranks: int) -> int:
        """Return how many of the ``ranks`` on its host each representative stands for."""
        return self.block // self.stride if ranks % self.block == 0 else 1

    def representative(self, rank: Ints) -> Ints:
        """Return the index in `ranks` of the representative of each of ``rank``."""
        block, index = _block_and_index(rank % self.period, self.block)
        return block * self.stride + index % self.stride

    def offset(self, source: Ints, target: Ints) -> Ints:
        """Return the offset from ``source`` to ``target``; equivalent pairs have the same one."""
        if self.block == 1:
            return (target - source) % self.size
        source_block, source_index = _block_and_index(source, self.block)
        target_block, target_index = _block_and_index(target, self.block)
        blocks = (target_block - source_block) % (self.size // self.block)
        return blocks * self.block + (target_index - source_index) % self.block

    def target(self, source: Ints, offset: Ints) -> Ints:
        """Return the rank at ``offset`` from ``source``."""
        if self.block == 1:
            return (source + offset) % self.size
        block, index = _block_and_index(source, self.block)
        block_offset, index_offset = _block_and_index(offset, self.block)
        target_block = (block + block_offset) % (self.size // self.block)
        return target_block * self.block + (index + index_offset) % self.block


def _block_and_index(rank: Ints, block: int) -> tuple[Ints, Ints]:
    """Return the block of each rank and its index in the block."""
    return rank // block, rank % block


def no_symmetry(schedule: Schedule) -> Symmetry:
    """Return the symmetry under which every rank represents only itself."""
    return Symmetry(schedule.size, schedule.size)


def program_symmetry(schedule: Schedule) -> Symmetry:
    """Return the symmetry of the ranks' programs, whatever hosts the ranks are on."""
    n = schedule.size
    period = n if schedule.period is None else math.gcd(schedule.period, n)
    return Symmetry(n, period, block=schedule.rotation_block or 1)


def host_symmetry(schedule: Schedule, mesh: Mesh, *, allow_rotation: bool = True) -> Symmetry:
    """Return the symmetry of the programs that also maps hosts onto hosts.

    Blocks may be rotated only where a host consists of whole blocks, or a block of whole hosts.
    Where hosts have different numbers of ranks, there is no symmetry.
    """
    n, each = schedule.size, set(mesh.ranks_per_host)
    if len(each) > 1:
        return no_symmetry(schedule)
    (k,) = each
    period = n if schedule.period is None else math.lcm(math.gcd(schedule.period, n), k)
    block = schedule.rotation_block if allow_rotation and schedule.rotation_block else 1
    if k % block == 0:
        return Symmetry(n, period, block)
    return Symmetry(n, period, block, stride=k) if block % k == 0 else Symmetry(n, period)


# --- expansion ---

MAX_OPERATIONS = 3_000_000
"""Limit on the operations of all expanded ranks; more would take minutes and gigabytes."""


@dataclass(frozen=True, slots=True)
class ExpandedRounds:
    """The rounds of all expanded ranks, rank after rank."""

    rank: Ints
    """The index of the round's rank among the expanded ranks."""
    lane: Ints
    earlier: Ints
    later: Ints
    """Dependency edges: round ``later[i]`` starts after round ``earlier[i]`` is done."""

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class ExpandedMessages:
    """Every message, with the rounds of its two ends."""

    source: Ints
    """The sender's round."""
    target: Ints
    """The receiver's round."""
    start: Ints
    stop: Ints
    """The sender's chunks from ``start`` up to ``stop``."""
    added: Ints
    """1 where the receiver adds the message, 0 where it copies."""
    offset: Ints
    """`Symmetry.offset` from the sender to the receiver."""

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True)
class ExpandedSchedule:
    """The rounds and messages of a schedule's representative ranks."""

    schedule: Schedule
    symmetry: Symmetry
    rounds: ExpandedRounds
    messages: ExpandedMessages


@lru_cache(maxsize=4)
def expand(schedule: Schedule, symmetry: Symmetry | None = None) -> ExpandedSchedule:
    """Expand the representative ranks of ``schedule``; every rank without a ``symmetry``.

    Raises:
        ScheduleError: A send has no matching receive, or the reverse.
        StrettoError: There are more than `MAX_OPERATIONS` operations.
    """
    symmetry = symmetry or no_symmetry(schedule)
    read_symmetry = program_symmetry(schedule) if symmetry.ranks_represented > 1 else symmetry
    _check_size(schedule, symmetry)
    reader = _ProgramReader(schedule)
    for rank in read_symmetry.ranks.tolist():
        reader.add(rank, schedule.program(rank))
        if len(reader.peer) > MAX_OPERATIONS:
            raise StrettoError(_too_large_message(schedule, f"more than {MAX_OPERATIONS:,}"))
    ops, program_rounds = reader.columns()
    if read_symmetry != symmetry:
        ops, program_rounds = _copy_to_ranks(ops, program_rounds, read_symmetry, symmetry.ranks)
    program_rounds = replace(program_rounds, rank=symmetry.representative(program_rounds.rank))
    return ExpandedSchedule(
        schedule, symmetry, program_rounds, _match_messages(schedule, symmetry, ops)
    )


@dataclass(frozen=True, slots=True)
class _ProgramRounds:
    """The rounds of programs of one shape."""

    round_of_op: Ints
    """The round of each operation."""
    lanes: list[int]
    """The lane of each round."""
    pairs: Ints
    """Dependency edges [pair, (earlier, later)] between rounds."""


@dataclass(frozen=True, slots=True)
class _Operations:
    """Operations as columns, rank after rank."""

    rank: Ints
    peer: Ints
    start: Ints
    stop: Ints
    lane: Ints
    round_of_op: Ints
    """The round of each operation."""
    sends: NDArray[np.bool_]
    """Whether the operation is a send."""
    adds: NDArray[np.bool_]
    """Whether the operation is a receive that adds."""


@dataclass(slots=True)
class _ProgramReader:
    """Collects the programs of several ranks and turns them into columns."""

    schedule: Schedule
    rank: list[int] = field(default_factory=list)
    peer: list[int] = field(default_factory=list)
    action: list[Action] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    stop: list[int] = field(default_factory=list)
    lane: list[int] = field(default_factory=list)
    round_of_op: list[Ints] = field(default_factory=list)
    round_rank: list[int] = field(default_factory=list)
    round_lane: list[int] = field(default_factory=list)
    pairs: list[Ints] = field(default_factory=list)
    rounds_by_shape: dict[object, _ProgramRounds] = field(default_factory=dict)

    def add(self, rank: int, program: Program) -> None:
        """Read one rank's program; programs of the same shape share one split into rounds."""
        action, peer, start, stop, after, lane = zip(*program, strict=True) if program else [()] * 6
        program_rounds = self.rounds_by_shape.get((lane, after))
        if program_rounds is None:
            program_rounds = self.rounds_by_shape[lane, after] = _cut_into_rounds(
                self.schedule, rank, program
            )
        first = len(self.round_rank)
        self.rank += [rank] * len(program)
        self.peer += peer
        self.action += action
        self.start += start
        self.stop += stop
        self.lane += lane
        self.round_of_op.append(program_rounds.round_of_op + first)
        self.round_rank += [rank] * len(program_rounds.lanes)
        self.round_lane += program_rounds.lanes
        self.pairs.append(program_rounds.pairs + first)

    def columns(self) -> tuple[_Operations, ExpandedRounds]:
        """Return the operations and rounds of all programs read."""
        pairs = np.concatenate(self.pairs)
        send, add = Action.SEND, Action.ADD
        ops = _Operations(
            rank=np.array(self.rank, dtype=np.int64),
            peer=np.array(self.peer, dtype=np.int64),
            start=np.array(self.start, dtype=np.int64),
            stop=np.array(self.stop, dtype=np.int64),
            lane=np.array(self.lane, dtype=np.int64),
            round_of_op=np.concatenate(self.round_of_op),
            sends=np.array([action is send for action in self.action], dtype=np.bool_),
            adds=np.array([action is add for action in self.action], dtype=np.bool_),
        )
        rank, lane = (np.array(c, dtype=np.int64) for c in (self.round_rank, self.round_lane))
        return ops, ExpandedRounds(rank, lane, pairs[:, 0], pairs[:, 1])


def _copy_to_ranks(
    ops: _Operations, program_rounds: ExpandedRounds, read_symmetry: Symmetry, ranks: Ints
) -> tuple[_Operations, ExpandedRounds]:
    """Return the operations and rounds of all ``ranks``, copied from their representatives.

    Afterwards the number of chunks of an operation is right, but not which chunks they are.
    """
    source = read_symmetry.representative(ranks)
    its_ops = _RepeatedRows.of(
        read_symmetry.representative(ops.rank), read_symmetry.num_representatives, source
    )
    its_rounds = _RepeatedRows.of(
        read_symmetry.representative(program_rounds.rank), read_symmetry.num_representatives, source
    )
    its_pairs = _RepeatedRows.of(
        read_symmetry.representative(program_rounds.rank)[program_rounds.later],
        read_symmetry.num_representatives,
        source,
    )
    at, rank = its_ops.index, ranks[its_ops.repetition]
    shift = its_rounds.shift
    moved = _Operations(
        rank=rank,
        peer=read_symmetry.target(rank, read_symmetry.offset(ops.rank, ops.peer)[at]),
        start=ops.start[at],
        stop=ops.stop[at],
        lane=ops.lane[at],
        round_of_op=ops.round_of_op[at] + shift[its_ops.repetition],
        sends=ops.sends[at],
        adds=ops.adds[at],
    )
    lane = program_rounds.lane[its_rounds.index]
    earlier = program_rounds.earlier[its_pairs.index] + shift[its_pairs.repetition]
    later = program_rounds.later[its_pairs.index] + shift[its_pairs.repetition]
    return moved, ExpandedRounds(ranks[its_rounds.repetition], lane, earlier, later)


@dataclass(frozen=True, slots=True)
class _RepeatedRows:
    """Blocks of rows, each repeated once for every owner in a list."""

    index: Ints
    """The original row of each new row."""
    repetition: Ints
    """The index in the list of owners that each new row belongs to."""
    shift: Ints
    """For each owner in the list, the new index of its first row minus the original one."""

    @classmethod
    def of(cls, owner: Ints, num_owners: int, owners: Ints) -> "_RepeatedRows":
        """Return the rows of each of ``owners`` in turn; original rows are sorted by owner."""
        count = np.bincount(owner, minlength=num_owners)
        first, each = (np.cumsum(count) - count)[owners], count[owners]
        begins = np.cumsum(each) - each
        repetition = np.repeat(np.arange(len(owners)), each)
        index = np.arange(int(each.sum())) - begins[repetition] + first[repetition]
        return cls(index, repetition, begins - first)


def _cut_into_rounds(schedule: Schedule, rank: int, program: Program) -> _ProgramRounds:
    """Find the round of each operation: a lane's operations fill its rounds in program order."""
    program_rounds = rounds(schedule, rank)
    rounds_by_lane: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    pairs: list[tuple[int, int]] = []
    for index, one_round in enumerate(program_rounds):
        rounds_by_lane.setdefault(one_round.lane, []).extend([index] * len(one_round.ops))
        before = {*one_round.waits_for, *([last[one_round.lane]] if one_round.lane in last else [])}
        pairs += [(earlier, index) for earlier in sorted(before)]
        last[one_round.lane] = index
    next_round = {lane: iter(indices) for lane, indices in rounds_by_lane.items()}
    round_of_op = np.array([next(next_round[op.lane]) for op in program], dtype=np.int64)
    edges = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return _ProgramRounds(round_of_op, [one_round.lane for one_round in program_rounds], edges)


def _match_messages(schedule: Schedule, symmetry: Symmetry, ops: _Operations) -> ExpandedMessages:
    """Match the k-th send of every route with its k-th receive."""
    n = schedule.size
    sender = np.where(ops.sends, ops.rank, ops.peer)
    receiver = np.where(ops.sends, ops.peer, ops.rank)
    offset = symmetry.offset(sender, receiver)
    route = symmetry.representative(sender) * n + offset
    route = route * (int(ops.lane.max(initial=0)) + 1) + ops.lane
    length = ops.stop - ops.start
    out, receives = np.flatnonzero(ops.sends), np.flatnonzero(~ops.sends)
    out = out[np.argsort(route[out], kind="stable")]
    receives = receives[np.argsort(route[receives], kind="stable")]
    if (
        len(out) != len(receives)
        or (route[out] != route[receives]).any()
        or (length[out] != length[receives]).any()
    ):
        raise ScheduleError(
            f"{schedule.name} for {n} ranks: sends and receives do not match, so it cannot be "
            "priced; stretto.collectives.verify shows where"
        )
    order = np.argsort(out)  # in the order of the senders' programs
    out, receives = out[order], receives[order]
    return ExpandedMessages(
        ops.round_of_op[out],
        ops.round_of_op[receives],
        ops.start[out],
        ops.stop[out],
        ops.adds[receives].astype(np.int64),
        offset[out],
    )


def _check_size(schedule: Schedule, symmetry: Symmetry) -> None:
    """Raise if the schedule is too large; estimated from the last rank, as a root has more."""
    if symmetry.num_representatives > 64:
        estimate = len(schedule.program(int(symmetry.ranks[-1]))) * symmetry.num_representatives
        if estimate > MAX_OPERATIONS:
            raise StrettoError(_too_large_message(schedule, f"about {estimate:,}"))


def _too_large_message(schedule: Schedule, how_many: str) -> str:
    return (
        f"{schedule.name} for {schedule.size:,} ranks has {how_many} operations, and no shift of "
        f"the ranks maps it onto itself on these hosts, so all have to be simulated; at most "
        f"{MAX_OPERATIONS:,} can be: give all hosts equally many ranks, or use fewer ranks or parts"
    )
