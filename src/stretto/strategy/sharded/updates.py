"""Updates of pieces: block by block as sums arrive, or all at once for whoever reads them first.

The optimizer was built for the model's parameters; its groups get the pieces that stand for them
on this rank, with the same options. Where updates are made as sums arrive, a thread makes them
with optimizers of its own, which share the memory of the first: nothing that the training loop does
with its optimizer meanwhile touches a gradient.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from stretto.errors import ConfigError
from stretto.strategy.sharded.intake import Intake
from stretto.strategy.sharded.norms import ShardNorms
from stretto.strategy.sharded.storage import UnitStorage

Options = list[dict[str, Any]]
"""What the groups of an optimizer say, parameters apart."""

_WHOLE_ONLY = {"LBFGS", "Muon", "Shampoo", "SOAP", "Adafactor", "SparseAdam"}
"""Optimizers whose update of an element looks at others of its tensor, and that have no norms."""


class Held(NamedTuple):
    """One unit: its memory, and what has come of its gradients."""

    storage: UnitStorage
    intake: Intake
    spread: bool
    """Whether nobody can say when its backward begins."""


class Updates:
    """Pieces of all units, in the optimizer's groups."""

    def __init__(
        self, optimizer: Optimizer, units: Sequence[Held], norms: ShardNorms | None
    ) -> None:
        self._optimizer, self._units, self._norms = optimizer, units, norms
        self._group_of = _groups_of(optimizer, units)
        self._parts: dict[tuple[int, tuple[int, ...]], Optimizer] = {}
        self._state_bytes: dict[Tensor, int] = {}
        self._num_known: dict[int, int] = {}
        self._whole = [list(group["params"]) for group in optimizer.param_groups]
        pieces = [piece for held in units for piece in held.storage.pieces]
        for index, group in enumerate(optimizer.param_groups):
            mine = [p.parameter for p in pieces if self._group_of[p.parameter] == index]
            group["params"] = mine + [p for p in group["params"] if not p.requires_grad]

    def hide(self) -> None:
        """Leave the training loop an optimizer that has rates, and nothing to step."""
        for group in self._optimizer.param_groups:
            group["params"] = []

    def options(self) -> Options:
        """Return what the groups say now: the rate of the step that begins."""
        groups = self._optimizer.param_groups
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def hand_over(self, unit: int, block: int, total: float, *, copy: bool) -> list[Tensor]:
        """Make the sums of a block, over ``total``, the gradients of its pieces.

        Returns what was copied for it: those of another type, or all that asked for it.
        """
        held = self._units[unit]
        storage = held.storage
        layout, flat = storage.layout.blocks[block], storage.gradients[block]
        recast = flat.dtype != storage.types.kept
        copies: list[Tensor] = []
        for owner in storage.owners:
            start = layout.gradient_start(owner)
            sums = flat[start : start + layout.chunk]
            if copy or recast:
                sums = sums.to(storage.types.kept, copy=True)
                copies.append(sums)
            if total != 1.0:
                sums.div_(total)
            for piece in storage.pieces_in(block, owner):
                unused = held.intake.nobody_had(block, owner, piece.tensor, piece.mark)
                piece.parameter.grad = None if unused else sums[piece.place : piece.stop]
        return copies

    def drop(self, unit: int, blocks: Iterable[int] | None = None) -> None:
        """Take the gradients away again."""
        wanted = None if blocks is None else set(blocks)
        for piece in self._units[unit].storage.pieces:
            if wanted is None or piece.block in wanted:
                piece.parameter.grad = None

    def step(self, unit: int, blocks: tuple[int, ...], options: Options) -> None:
        """Update the pieces of ``blocks``, whose gradients were handed over."""
        part = self._part(unit, blocks)
        for group, now in zip(part.param_groups, options, strict=True):
            group.update(now)
        if self._norms is not None:
            self._norms.expect(part)
        part.step()
        if self._norms is not None:
            self._norms.over(self._units[unit].storage.kept)

    def around_whole_step(self) -> Callable[[], None]:
        """Say that the training loop is about to step all pieces; call the answer after it."""
        norms = self._norms
        if norms is None:
            return lambda: None
        norms.expect(self._optimizer)
        return lambda: norms.over(self._units[0].storage.kept)

    def new_state_bytes(self, unit: int) -> int:
        """Return how much more the optimizer remembers of a unit than when last asked."""
        more, num_known = 0, len(self._optimizer.state)
        if self._num_known.get(unit) == num_known:
            return 0
        self._num_known[unit] = num_known
        for piece in self._units[unit].storage.pieces:
            state = self._optimizer.state.get(piece.parameter, {})
            now = sum(v.nbytes for v in state.values() if isinstance(v, Tensor) and v.dim())
            more += now - self._state_bytes.get(piece.parameter, 0)
            self._state_bytes[piece.parameter] = now
        return more

    def _part(self, unit: int, blocks: tuple[int, ...]) -> Optimizer:
        """Return an optimizer of the same memory for the pieces of ``blocks`` alone."""
        if (unit, blocks) not in self._parts:
            pieces = [p for p in self._units[unit].storage.pieces if p.block in blocks]
            groups = [
                {"params": [p.parameter for p in pieces if self._group_of[p.parameter] == index]}
                for index in range(len(self._optimizer.param_groups))
            ]
            self._parts[unit, blocks] = _like(self._optimizer, groups)
        return self._parts[unit, blocks]

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that the training loop has."""
        return self._optimizer

    @property
    def storages(self) -> list[UnitStorage]:
        """The memory of all units."""
        return [held.storage for held in self._units]

    def of_whole_parameters(self) -> Optimizer:
        """Return an optimizer for the model's own parameters that remembers nothing."""
        groups = [
            {**options, "params": whole}
            for options, whole in zip(self.options(), self._whole, strict=True)
        ]
        whole = _like(self._optimizer, groups)
        whole.state = defaultdict(dict)
        return whole


def refuse_unfit(optimizer: Optimizer) -> None:
    """Say so where an optimizer cannot work on pieces.

    Raises:
        ConfigError: It looks at whole tensors, or remembers something from the start.
    """
    name = type(optimizer).__name__
    if name in _WHOLE_ONLY:
        raise ConfigError(
            f"{name} looks at whole tensors, and a sharded rank has pieces of them: take another "
            'optimizer, or strategy.kind = "allreduce"'
        )
    if optimizer.state:
        raise ConfigError(
            f"{name} remembers something of its parameters before the first step, which cannot be "
            'cut into pieces: take another optimizer, or strategy.kind = "allreduce"'
        )


def _groups_of(optimizer: Optimizer, units: Sequence[Held]) -> Mapping[Tensor, int]:
    """Return the group of each piece: that of the parameter it stands for."""
    groups = {
        parameter: index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    found: dict[Tensor, int] = {}
    for held in units:
        for piece in held.storage.pieces:
            whole = held.storage.parameters[piece.tensor]
            if whole not in groups:
                raise ConfigError(
                    f"a parameter of shape {list(whole.shape)} is trainable but not in the "
                    "optimizer: freeze it (requires_grad_(False)) before the model is distributed"
                )
            found[piece.parameter] = groups[whole]
    return found


def _like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    part: Optimizer = object.__new__(type(optimizer))
    # A scheduler may have put a step of its own on the first one, and somebody hooks.
    own = {k: v for k, v in vars(optimizer).items() if k != "step"}
    hooks: dict[str, Any] = {k: OrderedDict() for k in own if k.endswith("_hooks")}
    vars(part).update(own, **hooks)
    part.param_groups = groups
    return part
