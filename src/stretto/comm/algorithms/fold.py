"""Any number of ranks for algorithms that want a power of two."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from stretto.comm.schedule import Action, Op, Program

Message = tuple[Action, int, int, int]
"""An operation before it is known what it comes after: action, peer, start, stop."""
Steps = Iterable[Sequence[Message]]


def taken_in_turn(steps: Steps) -> Program:
    """Return the program that takes one step after another, all on one lane.

    As `in_steps`, for those whose price at ten thousand ranks is that of making operations: each
    is made once.
    """
    ops: list[Op] = []
    before: tuple[int, ...] = ()
    first = 0
    for step in steps:
        for action, peer, start, stop in step:
            ops.append(Op(action, peer, start, stop, before))
        last, first = first, len(ops)
        before = (last, last + 1) if first - last == 2 else tuple(range(last, first))
    return tuple(ops)


@dataclass(frozen=True, slots=True)
class Members:
    """The power of two of ranks that do the work; counted, never listed: there may be thousands."""

    count: int
    extra: int
    """How many of them stand for two."""

    def __getitem__(self, place: int) -> int:
        """Return the rank at ``place``."""
        return 2 * place + 1 if place < self.extra else place + self.extra

    def place(self, rank: int) -> int:
        """Return where ``rank``, one of them, stands."""
        return rank // 2 if rank < 2 * self.extra else rank - self.extra


def folded(
    rank: int, size: int, num_chunks: int, core: Callable[[int, Members], Steps]
) -> Iterator[Sequence[Message]]:
    """Yield the steps of ``rank``, ``core(place, members)`` being done by a power of two of ranks.

    Of n = 2^m + r ranks the first 2r pair up: the even one hands its tensor to the odd one, which
    takes part for both, and is given the result at the end: two more messages of the whole tensor.
    """
    count = 1 << (size.bit_length() - 1)
    members = Members(count, size - count)
    paired = rank < 2 * members.extra
    if paired and rank % 2 == 0:
        yield ((Action.SEND, rank + 1, 0, num_chunks),)
        yield ((Action.COPY, rank + 1, 0, num_chunks),)
        return
    if paired:
        yield ((Action.ADD, rank - 1, 0, num_chunks),)
    yield from core(members.place(rank), members)
    if paired:
        yield ((Action.SEND, rank - 1, 0, num_chunks),)
