"""Follow the steps of a program on one rank: is data where it is used, and left alone meanwhile?

`check_flow` walks through the moments of two periods. At each it applies what is due and opens
gates, as the text of `stretto.program.step_program` says. For each block it keeps whether its
gradients are summed, its update is made, and its parameters are whole. All ranks are alike here.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stretto.errors import StrettoError
from stretto.program.step_program import (
    ALL,
    Applied,
    Group,
    Kind,
    Moment,
    Operation,
    Phase,
    Placement,
    Source,
    StepProgram,
    Updates,
)


class ProgramError(StrettoError):
    """A step program that is wrong: data would be missing, or ranks would wait for ever."""


@dataclass(frozen=True, slots=True)
class SentOperation:
    """An operation of one step, with its window on the main thread of a rank."""

    step: int
    index: int
    operation: Operation
    gate: int
    due: int

    def __str__(self) -> str:
        window = f"{self.operation.gate} -> {self.operation.due}"
        return f"{self.operation} ({window}, step {self.step})"

    @property
    def is_gather(self) -> bool:
        """Whether it makes a block's parameters whole."""
        operation = self.operation
        return operation.kind is Kind.ALL_GATHER and operation.source is Source.PARAMETER

    @property
    def is_in_place(self) -> bool:
        """Whether memory of the model is in use from gate to due, not only at these moments.

        What leaves as a copy and is applied when due is not.
        """
        operation = self.operation
        is_copy = operation.kind in (Kind.EXCHANGE, Kind.CALL)
        if is_copy or not operation.source.is_model_memory:
            return operation.applied is Applied.ARRIVAL
        return True

    @property
    def memory(self) -> Source:
        """What the operation writes when it is applied."""
        is_gradient = self.operation.source is Source.GRADIENT
        return Source.GRADIENT if is_gradient else Source.PARAMETER


def sent_in(program: StepProgram, steps: range) -> list[SentOperation]:
    """Return the operations of ``steps`` with their windows."""
    return [
        SentOperation(
            step,
            index,
            operation,
            program.position(step, operation.gate),
            program.position(step, operation.due),
        )
        for step in steps
        for index, operation in enumerate(program.leaving(step))
    ]


def check_flow(program: StepProgram, sent: Sequence[SentOperation]) -> None:
    """Check the data of two periods; ``sent`` are the operations of at least these.

    Raises:
        ProgramError: Data is missing where it is used, or is used while it changes.
    """
    _check_windows(program, sent)
    walk = _Walk(program, sent)
    for step in program.steps(2):
        for moment in program.moments:
            walk.pass_moment(step, moment)


class _BlockState:
    """What a rank has of one block while its steps are followed."""

    def __init__(self, *, is_whole: bool) -> None:
        self.summed_over: Group | None = None
        """Over whom the gradients are summed; None: they are this rank's own."""
        self.has_gradients = False
        self.is_whole = is_whole
        self.is_updated = False
        """Whether the step's update has been made."""


class _Walk:
    """The main thread of one rank on its way through the moments."""

    def __init__(self, program: StepProgram, sent: Sequence[SentOperation]) -> None:
        self._program = program
        self._at: Mapping[Phase, Callable[[Moment, int], None]] = {
            Phase.BACKWARD: self._before_backward,
            Phase.GRADIENT: self._after_backward,
            Phase.UPDATE: self._before_update,
            Phase.END: self._end,
            Phase.FORWARD: self._before_forward,
        }
        self._due: dict[int, list[SentOperation]] = defaultdict(list)
        self._gates: dict[int, list[SentOperation]] = defaultdict(list)
        for one in sent:
            self._due[one.due].append(one)
            self._gates[one.gate].append(one)
        # The model begins as the forward before leaves it: whole, or gathered for backward.
        gathered = {
            one.operation.block
            for one in sent
            if one.operation.due.phase is Phase.BACKWARD and one.operation.due.later
        }
        self._states = [
            _BlockState(is_whole=not self._is_freed_after_forward(block) or block in gathered)
            for block in range(len(program.blocks))
        ]

    def pass_moment(self, step: int, moment: Moment) -> None:
        """Pass one moment: what is due from earlier steps, gates, what is due from this step."""
        position = self._program.position(step, moment)
        has_happened = moment.phase in (Phase.GRADIENT, Phase.UPDATED)
        run = self._at.get(moment.phase, _do_nothing)
        if has_happened:
            run(moment, step)
        for one in self._due[position]:
            if one.step < step:
                self._apply(one)
        for one in self._gates[position]:
            self._start(one)
        for one in self._due[position]:
            if one.step == step:
                self._apply(one)
        if not has_happened:
            run(moment, step)

    def _start(self, sent: SentOperation) -> None:
        operation = sent.operation
        if operation.after is not None or operation.clears or operation.source is Source.SAMPLE:
            return
        if operation.source is Source.GRADIENT:
            if not self._states[operation.block].has_gradients:
                raise ProgramError(f"{sent}: the gradients are not complete when it may start")
        elif not (sent.is_gather and operation.due.phase is Phase.BACKWARD):
            for block in self._blocks(operation.block):
                if not self._states[block].is_updated:
                    raise ProgramError(f"{sent}: it may start before the update of block {block}")

    def _apply(self, sent: SentOperation) -> None:
        operation = sent.operation
        if operation.source is Source.GRADIENT:
            self._apply_gradients(sent)
        elif sent.is_gather:
            state = self._states[operation.block]
            if state.is_whole:
                raise ProgramError(f"{sent}: the block is whole already")
            state.is_whole = True

    def _apply_gradients(self, sent: SentOperation) -> None:
        operation = sent.operation
        state = self._states[operation.block]
        if state.summed_over is operation.group or state.summed_over is Group.WORLD:
            raise ProgramError(f"{sent}: the gradients are summed over these ranks already")
        state.summed_over = operation.group
        if self._program.updates is Updates.ON_ARRIVAL:
            self._update(operation.block, Moment(Phase.UPDATE, operation.block))

    def _before_backward(self, moment: Moment, step: int) -> None:
        if moment.block != ALL:
            self._check_whole(moment, step)
            return
        for state in self._states:
            state.is_updated = state.has_gradients = False

    def _after_backward(self, moment: Moment, _step: int) -> None:
        if moment.block == ALL:
            return
        state = self._states[moment.block]
        state.has_gradients, state.summed_over = True, None
        if self._program.blocks[moment.block].placement.shards_update:
            state.is_whole = False

    def _before_update(self, moment: Moment, _step: int) -> None:
        is_whole = self._program.updates is Updates.WHOLE
        if self._program.updates is Updates.ON_ARRIVAL or (moment.block == ALL) != is_whole:
            return
        for block in self._blocks(moment.block):
            self._update(block, moment)

    def _end(self, moment: Moment, step: int) -> None:
        if self._program.updates is not Updates.ON_ARRIVAL:
            self._check_updated(moment, step, range(len(self._states)))

    def _before_forward(self, moment: Moment, step: int) -> None:
        if moment.block == ALL:
            return
        self._check_updated(moment, step, self._blocks(moment.block))
        self._check_whole(moment, step)
        if self._is_freed_after_forward(moment.block):
            self._states[moment.block].is_whole = False

    def _check_whole(self, moment: Moment, step: int) -> None:
        if not self._states[moment.block].is_whole:
            raise ProgramError(f"{moment} of step {step}: the parameters are not whole")

    def _check_updated(self, moment: Moment, step: int, blocks: range) -> None:
        for block in blocks:
            if not self._states[block].is_updated:
                raise ProgramError(f"{moment} of step {step}: block {block} is not updated")

    def _update(self, block: int, moment: Moment) -> None:
        state, promised = self._states[block], self._program.gradients
        if promised is not None and state.summed_over is not promised:
            raise ProgramError(
                f"{moment}: the gradients of block {block} are not summed over {promised.value}"
            )
        if promised is None and state.summed_over is not None:
            raise ProgramError(f"{moment}: the gradients of block {block} should be the rank's own")
        state.is_updated = True

    def _is_freed_after_forward(self, block: int) -> bool:
        return self._program.blocks[block].placement is Placement.SHARDED_TWICE

    def _blocks(self, block: int) -> range:
        return range(len(self._program.blocks)) if block == ALL else range(block, block + 1)


def _do_nothing(_moment: Moment, _step: int) -> None:
    """Do nothing: the main thread has nothing to do at this moment."""


@dataclass(frozen=True, slots=True)
class _Access:
    """The main thread uses memory of a block, from one position to another."""

    memory: Source
    block: int
    start: int
    end: int
    moment: Moment


def _accesses(program: StepProgram, step: int) -> Iterator[_Access]:
    """Yield what the main thread reads and writes in ``step``."""
    both = (Source.GRADIENT, Source.PARAMETER)
    for moment in program.moments:
        start, block = program.position(step, moment), moment.block
        is_update = moment.phase is Phase.UPDATE
        if is_update and (block == ALL) == (program.updates is Updates.WHOLE):
            blocks = range(len(program.blocks)) if block == ALL else range(block, block + 1)
            for updated in blocks:
                yield from (_Access(memory, updated, start, start + 1, moment) for memory in both)
        elif moment.phase is Phase.BACKWARD and block != ALL:
            end = program.position(step, Moment(Phase.GRADIENT, block))
            yield from (_Access(memory, block, start, end, moment) for memory in both)
        elif moment.phase is Phase.FORWARD and block != ALL:
            yield _Access(Source.PARAMETER, block, start, start + 1, moment)


def _check_windows(program: StepProgram, sent: Sequence[SentOperation]) -> None:
    """Check that nothing touches memory that an operation in flight works on."""
    by_memory: dict[tuple[Source, int], list[SentOperation]] = defaultdict(list)
    for one in sent:
        if one.is_in_place and one.operation.block != ALL:
            by_memory[one.memory, one.operation.block].append(one)
    for group in by_memory.values():
        for first, second in pairwise(sorted(group, key=lambda one: (one.gate, one.index))):
            follows = second.step == first.step and second.operation.after == first.index
            if second.gate < first.due and not follows:
                raise ProgramError(f"{first} and {second} work on the same memory")
    for step in program.steps(2):
        for access in _accesses(program, step):
            for one in by_memory[access.memory, access.block]:
                if access.start < one.due and one.gate < access.end:
                    raise ProgramError(
                        f"{one}: at {access.moment} of step {step} the rank uses the same memory"
                    )
