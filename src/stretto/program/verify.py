"""Verify step programs: every block's data arrives before its use, and no rank waits for ever.

`verify` checks a program in four ways and raises `ProgramError` with the first reason found.

- *Form*: gates come before dues, groups are those of the route, and a lane belongs to one queue,
  so that timing never decides in which order ranks use it.
- *Rounds*: where models differ, each block is exchanged as often as the program promises, and what
  was exchanged is applied in time.
- *Flow* (`stretto.program.data_flow`): the steps of two periods are followed on one rank. Gradients
  are summed over the promised ranks once before their update, parameters are whole where they are
  used, and nothing touches memory that an operation in flight works on.
- *Waiting* (`stretto.program.blocking_run`): all ranks run the program with messages that block,
  also with skipped steps and with a consolidation after a step.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from stretto.collectives.schedule import Schedule
from stretto.program.blocking_run import Skips, find_deadlock
from stretto.program.data_flow import ProgramError, SentOperation, check_flow, sent_in
from stretto.program.messages import lanes_of, partners_of
from stretto.program.step_program import (
    ALL,
    Group,
    GroupGather,
    Operation,
    PairCall,
    PeerRound,
    Source,
    StepProgram,
)

MAX_RANKS_RUN = 16
"""Programs of more ranks are checked without the run of all ranks."""

__all__ = ["ProgramError", "verify"]


def verify(program: StepProgram) -> None:
    """Check that ``program`` can be executed and keeps what it promises.

    Raises:
        ProgramError: It does not; the text names the operation and the moment.
    """
    sent = sent_in(program, program.steps(3))
    for one in sent:
        _check_form(program, one)
    _check_queues(program, sent)
    _check_rounds(program, sent)
    _check_group_gathers(sent)
    check_flow(program, sent)
    if program.mesh.size <= MAX_RANKS_RUN:
        _check_waiting(program)


def _check_form(program: StepProgram, sent: SentOperation) -> None:
    operation, size = sent.operation, program.mesh.size
    if not sent.gate <= sent.due:
        raise ProgramError(f"{sent}: it is due before it may start")
    if operation.block != ALL and not 0 <= operation.block < len(program.blocks):
        raise ProgramError(f"{sent}: there are only {len(program.blocks)} blocks")
    route = operation.route
    if isinstance(route, Schedule) and route.size != size:
        raise ProgramError(f"{sent}: {route.name} is for {route.size} ranks, not for {size}")
    if operation.after is not None:
        _check_after(program, sent, operation.after)
    if operation.group not in _groups_of_route(program, operation):
        raise ProgramError(f"{sent}: it is for {operation.group.value}, but its messages are not")


def _check_after(program: StepProgram, sent: SentOperation, after: int) -> None:
    """Check that an operation follows an earlier one of the same unit, in a queue that fits."""
    if not 0 <= after < sent.index:
        raise ProgramError(f"{sent}: it follows operation {after}, which is not before it")
    earlier = program.leaving(sent.step)[after]
    units = [program.blocks[one.block].unit for one in (earlier, sent.operation)]
    if units[0] != units[1]:
        raise ProgramError(f"{sent}: it follows the {earlier}, of another unit")


def _groups_of_route(program: StepProgram, operation: Operation) -> set[Group]:
    """Return the groups that the messages of ``operation`` may connect."""
    route, size = operation.route, program.mesh.size
    if isinstance(route, PeerRound | PairCall):
        return {Group.PEERS}
    if isinstance(route, GroupGather):
        return {Group.INSIDE}
    if size == 1:
        return {Group.WORLD, Group.INSIDE}
    if route is None or route.native:
        return {Group.WORLD}
    connected = len(_connected(operation, size))
    found = {Group.WORLD} if connected == size else set()
    return found | ({Group.INSIDE} if connected == program.group_width else set())


def _connected(operation: Operation, size: int) -> set[int]:
    """Return the ranks that rank 0 is connected with, directly or through others."""
    found, waiting = {0}, [0]
    while waiting:
        new = partners_of(operation, waiting.pop(), size) - found
        found |= new
        waiting += new
    return found


def _check_queues(program: StepProgram, sent: Sequence[SentOperation]) -> None:
    """Check that a lane belongs to one queue, unless an operation waits for all others first."""
    user_of_lane: dict[int, SentOperation] = {}
    for one in sent:
        for lane in () if one.operation.clears else lanes_of(one.operation, program.mesh.size):
            other = user_of_lane.setdefault(lane, one)
            if other.operation.queue != one.operation.queue:
                raise ProgramError(
                    f"{one} and {other} share lane {lane}, but start in different queues: ranks "
                    "may use the lane in different orders"
                )


def _check_rounds(program: StepProgram, sent: Sequence[SentOperation]) -> None:
    """Check that each block is mixed once in every round, and in time."""
    mixing = program.mixing
    by_block: dict[int, list[int]] = defaultdict(list)
    for one in sent:
        operation = one.operation
        if operation.group is not Group.PEERS and operation.source is not Source.CHANGE:
            continue
        if mixing is None or (operation.source, operation.group) != (mixing.source, mixing.group):
            if isinstance(operation.route, GroupGather | PairCall):
                continue
            raise ProgramError(f"{one}: the program does not promise to exchange it")
        by_block[operation.block].append(one.step)
        if one.due >= (one.step + mixing.late_steps + 1) * len(program.moments):
            raise ProgramError(f"{one}: it is applied more than {mixing.late_steps} steps later")
    for block in range(len(program.blocks)) if mixing is not None else ():
        assert mixing is not None
        expected = mixing.rounds_of(block, program.steps(3))
        if by_block[block] != expected:
            raise ProgramError(
                f"block {block} is exchanged in steps {by_block[block][:8]}, expected "
                f"{expected[:8]}"
            )


def _check_group_gathers(sent: Sequence[SentOperation]) -> None:
    """Check that what the ranks of a group received is gathered in the group, once."""
    gathers: dict[tuple[int, int | None], list[SentOperation]] = defaultdict(list)
    for one in sent:
        if isinstance(one.operation.route, GroupGather):
            gathers[one.step, one.operation.after].append(one)
    for one in sent:
        route = one.operation.route
        width = route.width if isinstance(route, PeerRound) else 1
        found = gathers.pop((one.step, one.index), [])
        if len(found) != (width > 1):
            raise ProgramError(f"{one}: its result is gathered {len(found)} times in a group")
        if any(gather.due != one.due for gather in found):
            raise ProgramError(f"{one}: its result is due at another moment than its gather")
    for rest in gathers.values():
        raise ProgramError(f"{rest[0]}: it follows no exchange")


def _check_waiting(program: StepProgram) -> None:
    steps = program.steps(2)
    nobody: Skips = frozenset()
    runs: list[tuple[Skips, int | None]] = [(nobody, None), (nobody, steps[0]), (nobody, steps[-1])]
    runs += [(skips, None) for skips in _skips(program, steps)]
    for skips, consolidated in runs:
        reason = find_deadlock(program, skips, consolidated)
        if reason is not None:
            raise ProgramError(reason)


def _skips(program: StepProgram, steps: range) -> Iterator[Skips]:
    """Yield which ranks skip which steps: all together, or one alone."""
    ranks = range(program.mesh.size)
    for step in {steps[0], steps[-1]}:
        yield frozenset((step, rank) for rank in ranks)
        if program.skips_alone:
            yield from (frozenset({(step, rank)}) for rank in {0, program.mesh.size - 1})
