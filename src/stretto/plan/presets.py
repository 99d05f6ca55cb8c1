"""The plans that people know by name: ddp, zero1, zero2, zero3, dear; and random ones."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from stretto.plan.building import When, build
from stretto.plan.check import window
from stretto.plan.slots import Slots
from stretto.plan.value import Plan, Sharding, Unit, What


@dataclass(frozen=True, slots=True)
class Shape:
    """What a preset must know of a unit."""

    name: str
    numel: int
    used_often: bool = False


@dataclass(frozen=True, slots=True)
class Wish:
    """What may be asked of a preset."""

    prefetch: int | None = None
    """Units ahead of the one that runs which may be gathered; None: as many as there are."""
    pending: int | None = None
    """Slots for which a gradient may wait for its reduction; None: until it is needed."""
    block: int | None = None
    """Elements of a block at most; None: a unit is one."""
    barrier: bool = False
    whole_layers: bool = False
    in_host: bool = False
    checkpoint: bool = False


def named_plan(name: str, shapes: Sequence[Shape], wish: Wish = Wish()) -> Plan:  # noqa: B008
    """Return the plan that people call ``name``."""
    return PRESETS[name](shapes, wish)


def random_plan(shapes: Sequence[Shape], seed: int, *, whole_layers: bool = False) -> Plan:
    """Return a valid plan in which everything that may be chosen is: sharding, blocks, windows."""
    draw = random.Random(seed)
    in_host = draw.random() < 0.2
    barrier = draw.random() < 0.25
    units = [
        _unit(
            shape,
            _drawn_sharding(shape, draw),
            draw.random() < 0.3,
            _drawn_cuts(shape, draw),
            in_host and draw.random() < 0.5,
        )
        for shape in shapes
    ]
    bare = Plan(units=tuple(units), messages=(), barrier=barrier)
    reduced: dict[tuple[int, int], int] = {}

    def timing(slots: Slots, what: What, unit: int, block: int) -> When:
        opens, due = window(bare, what, unit)
        earliest = 2 * opens
        if what is What.REDUCE:
            earliest, due = earliest + 1, draw.randint(opens + 1, due)
        if what is What.GATHER:
            blocks = range(len(units[unit].blocks)) if whole_layers else (block,)
            over = [reduced[unit, one] for one in blocks]
            earliest = max(earliest, *over, 2 * slots.update + 1 if barrier else 0)
        moment = draw.randint(earliest, 2 * due)
        if what is What.REDUCE:
            reduced[unit, block] = moment
        return When(draw.randint(opens, moment // 2), due, moment)

    return build(units, timing, barrier=barrier, whole_layers=whole_layers)


def _drawn_sharding(shape: Shape, draw: random.Random) -> Sharding:
    kinds = [kind for kind in Sharding if not (shape.used_often and kind is Sharding.ZERO3)]
    return draw.choice(kinds)


def _drawn_cuts(shape: Shape, draw: random.Random) -> tuple[int, ...]:
    count = draw.choice([1, 1, 2, 3])
    inner = range(1, shape.numel)
    bounds = [0, *sorted(draw.sample(inner, min(count - 1, len(inner)))), shape.numel]
    return tuple(stop - start for start, stop in pairwise(bounds))


def _unit(
    shape: Shape,
    sharding: Sharding,
    checkpoint: bool,
    blocks: tuple[int, ...],
    in_host: bool = False,
) -> Unit:
    return Unit(
        name=shape.name,
        numel=shape.numel,
        sharding=sharding,
        blocks=blocks,
        checkpoint=checkpoint and not shape.used_often,
        in_host=in_host and sharding.is_split,
        used_often=shape.used_often,
    )


def even_blocks(numel: int, block: int | None) -> tuple[int, ...]:
    """Return as few blocks as can be of at most ``block`` elements, all about as large."""
    count = 1 if block is None else -(-numel // block)
    bounds = [numel * i // count for i in range(count + 1)]
    return tuple(stop - start for start, stop in pairwise(bounds))


def _same(kind: Sharding, shapes: Sequence[Shape], wish: Wish) -> Plan:
    """Return the plan in which all units are sharded alike, as far as they can be."""
    return _eager([kind] * len(shapes), shapes, wish)


def _zero3(shapes: Sequence[Shape], wish: Wish) -> Plan:
    """Return the plan that lets go after forward what is not needed at once for backward."""
    last = len(shapes) - 1
    kept = [shape.used_often or index == last for index, shape in enumerate(shapes)]
    return _eager([Sharding.ZERO2 if keep else Sharding.ZERO3 for keep in kept], shapes, wish)


def _eager(kinds: Sequence[Sharding], shapes: Sequence[Shape], wish: Wish) -> Plan:
    """Reduce in the order of backward, gather in the order of use, each as early as allowed."""
    units = [
        _unit(shape, kind, wish.checkpoint, even_blocks(shape.numel, wish.block), wish.in_host)
        for shape, kind in zip(shapes, kinds, strict=True)
    ]
    far = wish.prefetch if wish.prefetch is not None else 2 * len(units) + 1

    def timing(slots: Slots, what: What, unit: int, _block: int) -> When:
        backward, forward = slots.backward(unit), slots.forward(unit)
        if what is What.REDUCE:
            last = slots.update if wish.barrier else forward
            due = last if wish.pending is None else min(last, backward + 1 + wish.pending)
            return When(backward, due, 2 * backward + 1)
        if what is What.GATHER:
            gate = max(forward - far, slots.update)
            # Behind all reductions, in the order of use.
            return When(gate, forward, max(2 * gate, 2 * slots.update + 1))
        used = slots.count + backward
        gate = max(used - far, forward + 1)
        return When(gate, used, 2 * gate)

    return build(units, timing, barrier=wish.barrier, whole_layers=wish.whole_layers)


PRESETS: Mapping[str, Callable[[Sequence[Shape], Wish], Plan]] = {
    "ddp": partial(_same, Sharding.DP),
    "zero1": partial(_same, Sharding.ZERO1),
    "zero2": partial(_same, Sharding.ZERO2),
    "zero3": _zero3,
    "dear": partial(_same, Sharding.SDP),
}
"""By name; what each leaves open is in a `Wish`."""
