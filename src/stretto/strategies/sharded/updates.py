"""Optimizer updates of parameter slices: block by block as sums arrive, or all at once.

The optimizer was built for the model's parameters. Its groups get this rank's slices of them, with
the same options. If updates are made as sums arrive, another thread makes them, with clones of the
optimizer that share its state. The training loop may therefore use its own optimizer meanwhile (as
with ``zero_grad``) without touching these gradients.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.errors import ConfigError
from stretto.strategies.sharded.sharded_unit import ShardedUnit


class _CopyTarget(NamedTuple):
    """Copies elements ``start`` to ``stop`` of a flat gradient to a view of a gradient block."""

    view: Tensor
    start: int
    stop: int


class GradientInput:
    """Copies a unit's gradients into its gradient blocks and tracks which have arrived.

    Behind each chunk of a block lie has-gradient flags. Their sums tell whether any rank had a
    gradient of a parameter.
    """

    def __init__(self, sharded_unit: ShardedUnit) -> None:
        self._copy_targets: list[list[_CopyTarget]] = [[] for _ in sharded_unit.parameters]
        self._has_gradient_flags: list[Tensor] = []
        self._flag_positions: list[list[tuple[int, int, int]]] = [
            [] for _ in sharded_unit.parameters
        ]
        for index, (block, flat) in enumerate(
            zip(sharded_unit.layout.blocks, sharded_unit.gradients, strict=True)
        ):
            for s in block.slices:
                first = block.gradient_start(s.owner) + s.chunk_offset
                view = flat[first : first + s.length]
                self._copy_targets[s.tensor].append(_CopyTarget(view, s.start, s.start + s.length))
                self._flag_positions[s.tensor].append((index, s.owner, s.flag_index))
            rows = flat.view(block.ranks, block.chunk + block.num_flags)
            self._has_gradient_flags.append(rows[:, block.chunk :])
        self.begin()

    def begin(self) -> None:
        """Begin a step: no gradient has arrived."""
        self._missing = set(range(len(self._copy_targets)))

    @property
    def missing(self) -> list[int]:
        """Indices of the parameters whose gradients have not arrived."""
        return sorted(self._missing)

    def copy_in(self, tensor: int, gradient: Tensor, weight: float = 1.0) -> None:
        """Copy one gradient, times ``weight``, into the blocks."""
        dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
        flat = dense.reshape(-1)
        for view, start, stop in self._copy_targets[tensor]:
            view.copy_(flat[start:stop])
            if weight != 1.0:
                view.mul_(weight)
        self._missing.discard(tensor)

    def close(self) -> None:
        """Fill missing gradients with zeros and set the has-gradient flags."""
        for flags in self._has_gradient_flags:
            flags.fill_(1)
        for tensor in self._missing:
            for copy_target in self._copy_targets[tensor]:
                copy_target.view.zero_()
            for block, owner, flag_index in self._flag_positions[tensor]:
                self._has_gradient_flags[block][owner, flag_index] = 0

    def is_unused_everywhere(self, block: int, owner: int, tensor: int, flag_index: int) -> bool:
        """Return whether no rank had a gradient of ``tensor``; call it after the reduction."""
        if tensor not in self._missing:
            return False
        return not bool(self._has_gradient_flags[block][owner, flag_index] > 0)


class ShardNorms:
    """Norms of layers whose slices lie on several ranks: a `NormFunction` of `layer_optimizer`.

    Each rank computes squares of its slices; one small all-reduce adds them up. All ranks must call
    `before_step` and `after_step` around a step of the optimizer.
    """

    def __init__(
        self,
        layers: Mapping[Tensor, int],
        contributes: Sequence[bool],
        all_reduce_small: Callable[[Tensor], None],
    ) -> None:
        """Create the norms.

        Args:
            layers: Layer index of each parameter slice of this rank.
            contributes: For each layer, whether this rank's slices are part of the sum.
            all_reduce_small: Sums a tensor over all ranks in place.
        """
        self._layers = layers
        self._contributes = torch.tensor(contributes, dtype=torch.float64)
        self._all_reduce_small = all_reduce_small
        self._expected_layers: list[int] = []
        self._norms_requested = True

    def before_step(self, optimizer: Optimizer) -> None:
        """Record the layers whose norms the next step of ``optimizer`` needs, in its order."""
        self._expected_layers = [
            self._layers[parameter]
            for group in optimizer.param_groups
            if group.get("adapt", True)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self._norms_requested = False

    def after_step(self, like: Tensor) -> None:
        """Take part in the all-reduce if the optimizer needed no norm on this rank."""
        if not self._norms_requested:
            self([], like)

    def __call__(self, tensors: Sequence[Tensor], like: Tensor | None = None) -> Tensor:
        """Return the norms [1, 2L]: of the layers' weights, then of their gradients or updates.

        Args:
            tensors: The slices of the L layers' weights, then of their gradients or updates.
            like: A tensor on the device to use where ``tensors`` is empty.
        """
        self._norms_requested = True
        layers = self._expected_layers
        # Two rows on every rank: the weights, and the gradients or updates.
        device = tensors[0].device if tensors else like.device if like is not None else None
        squares = torch.zeros(2, len(self._contributes), dtype=torch.float64, device=device)
        places = torch.tensor(layers, dtype=torch.long, device=device)
        if tensors:
            norms = torch.stack(torch._foreach_norm([t.reshape(-1) for t in tensors]))
            squares.index_add_(1, places, norms.double().square().view(2, -1))
            squares *= self._contributes.to(squares.device)
        self._all_reduce_small(squares)
        return squares.sqrt()[:, places].reshape(1, -1).to(_type_of(tensors))


def _type_of(tensors: Sequence[Tensor]) -> torch.dtype:
    needs_float64 = any(tensor.dtype is torch.float64 for tensor in tensors)
    return torch.float64 if needs_float64 else torch.float32


GroupOptions = list[dict[str, Any]]
"""Options of an optimizer's parameter groups, without the parameters."""

_NEEDS_FULL_TENSORS = {"LBFGS", "Muon", "Shampoo", "SOAP", "Adafactor", "SparseAdam"}
"""Optimizers that read whole tensors to update an element, and do not use shared norms."""


class UnitState(NamedTuple):
    """A sharded unit and the state of its gradients."""

    sharded: ShardedUnit
    gradient_input: GradientInput
    always_active: bool
    """Whether the unit takes part in the whole backward, because its beginning is not known."""


class ShardUpdates:
    """Updates the parameter slices of all units with the user's optimizer."""

    def __init__(
        self, optimizer: Optimizer, units: Sequence[UnitState], norms: ShardNorms | None
    ) -> None:
        self._optimizer, self._units, self._norms = optimizer, units, norms
        self._group_of = _group_indices(optimizer, units)
        self._block_optimizers: dict[tuple[int, tuple[int, ...]], Optimizer] = {}
        self._state_bytes: dict[Tensor, int] = {}
        self._num_states: dict[int, int] = {}
        self._full_parameters = [list(group["params"]) for group in optimizer.param_groups]
        param_slices = [
            param_slice for unit_state in units for param_slice in unit_state.sharded.param_slices
        ]
        for index, group in enumerate(optimizer.param_groups):
            own_slices = [p.parameter for p in param_slices if self._group_of[p.parameter] == index]
            group["params"] = own_slices + [p for p in group["params"] if not p.requires_grad]

    def empty_loop_optimizer(self) -> None:
        """Remove all parameters from the user's optimizer; its options stay in use."""
        for group in self._optimizer.param_groups:
            group["params"] = []

    def options(self) -> GroupOptions:
        """Return a copy of the group options, as the learning rate of the step that begins."""
        groups = self._optimizer.param_groups
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def assign_gradients(self, unit: int, block: int, total: float, *, copy: bool) -> list[Tensor]:
        """Set the gradients of a block's slices to the block's sums divided by ``total``.

        Returns the tensors that were copied: all if ``copy`` is set or the wire type differs.
        """
        unit_state = self._units[unit]
        sharded_unit = unit_state.sharded
        layout, flat = sharded_unit.layout.blocks[block], sharded_unit.gradients[block]
        must_cast = flat.dtype != sharded_unit.dtypes.master
        copies: list[Tensor] = []
        for owner in sharded_unit.owners:
            start = layout.gradient_start(owner)
            sums = flat[start : start + layout.chunk]
            if copy or must_cast:
                sums = sums.to(sharded_unit.dtypes.master, copy=True)
                copies.append(sums)
            if total != 1.0:
                sums.div_(total)
            for param_slice in sharded_unit.slices_in_chunk(block, owner):
                is_unused = unit_state.gradient_input.is_unused_everywhere(
                    block, owner, param_slice.tensor, param_slice.flag_index
                )
                param_slice.parameter.grad = (
                    None if is_unused else sums[param_slice.chunk_offset : param_slice.stop]
                )
        return copies

    def clear_gradients(self, unit: int, blocks: Iterable[int] | None = None) -> None:
        """Clear the gradients of a unit's slices, of all blocks or of ``blocks``."""
        selected_blocks = None if blocks is None else set(blocks)
        for param_slice in self._units[unit].sharded.param_slices:
            if selected_blocks is None or param_slice.block in selected_blocks:
                param_slice.parameter.grad = None

    def step(self, unit: int, blocks: tuple[int, ...], options: GroupOptions) -> None:
        """Update the slices of ``blocks``, whose gradients are assigned, with ``options``."""
        block_optimizer = self._optimizer_for_blocks(unit, blocks)
        for group, current_options in zip(block_optimizer.param_groups, options, strict=True):
            group.update(current_options)
        if self._norms is not None:
            self._norms.before_step(block_optimizer)
        block_optimizer.step()
        if self._norms is not None:
            self._norms.after_step(self._units[unit].sharded.master)

    def before_full_step(self) -> Callable[[], None]:
        """Prepare for a step of all slices by the training loop; call the result after it."""
        norms = self._norms
        if norms is None:
            return lambda: None
        norms.before_step(self._optimizer)
        return lambda: norms.after_step(self._units[0].sharded.master)

    def new_state_bytes(self, unit: int) -> int:
        """Return by how many bytes the unit's optimizer state has grown since the last call."""
        growth, num_states = 0, len(self._optimizer.state)
        if self._num_states.get(unit) == num_states:
            return 0
        self._num_states[unit] = num_states
        for param_slice in self._units[unit].sharded.param_slices:
            state = self._optimizer.state.get(param_slice.parameter, {})
            num_bytes = sum(v.nbytes for v in state.values() if isinstance(v, Tensor) and v.dim())
            growth += num_bytes - self._state_bytes.get(param_slice.parameter, 0)
            self._state_bytes[param_slice.parameter] = num_bytes
        return growth

    def _optimizer_for_blocks(self, unit: int, blocks: tuple[int, ...]) -> Optimizer:
        """Return a clone of the optimizer, with shared state, for the slices of ``blocks``."""
        if (unit, blocks) not in self._block_optimizers:
            param_slices = [p for p in self._units[unit].sharded.param_slices if p.block in blocks]
            groups = [
                {
                    "params": [
                        p.parameter for p in param_slices if self._group_of[p.parameter] == index
                    ]
                }
                for index in range(len(self._optimizer.param_groups))
            ]
            self._block_optimizers[unit, blocks] = _clone_optimizer(self._optimizer, groups)
        return self._block_optimizers[unit, blocks]

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the training loop."""
        return self._optimizer

    @property
    def sharded_units(self) -> list[ShardedUnit]:
        """The sharded units."""
        return [unit_state.sharded for unit_state in self._units]

    def new_full_optimizer(self) -> Optimizer:
        """Return an optimizer of the model's whole parameters with an empty state."""
        groups = [
            {**options, "params": full_parameters}
            for options, full_parameters in zip(self.options(), self._full_parameters, strict=True)
        ]
        full_optimizer = _clone_optimizer(self._optimizer, groups)
        full_optimizer.state = defaultdict(dict)
        return full_optimizer


def check_optimizer(optimizer: Optimizer) -> None:
    """Check that an optimizer can update slices of parameters.

    Raises:
        ConfigError: The optimizer reads whole tensors, or has state before its first step.
    """
    name = type(optimizer).__name__
    if name in _NEEDS_FULL_TENSORS:
        raise ConfigError(
            f"{name} reads whole tensors, and a sharded rank has slices of them: take another "
            'optimizer, or strategy.kind = "allreduce"'
        )
    if optimizer.state:
        raise ConfigError(
            f"{name} has state before its first step, which cannot be sharded: take another "
            'optimizer, or strategy.kind = "allreduce"'
        )


def _group_indices(optimizer: Optimizer, units: Sequence[UnitState]) -> Mapping[Tensor, int]:
    """Return the parameter group of each slice: the group of its whole parameter."""
    groups = {
        parameter: index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    found: dict[Tensor, int] = {}
    for unit_state in units:
        for param_slice in unit_state.sharded.param_slices:
            full_parameter = unit_state.sharded.parameters[param_slice.tensor]
            if full_parameter not in groups:
                raise ConfigError(
                    f"a parameter of shape {list(full_parameter.shape)} is trainable but not in "
                    "the optimizer: freeze it (requires_grad_(False)) before the model is "
                    "distributed"
                )
            found[param_slice.parameter] = groups[full_parameter]
    return found


def _clone_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    block_optimizer: Optimizer = object.__new__(type(optimizer))
    # An LR scheduler may have replaced `step` on the instance, and users may have set hooks.
    attributes = {k: v for k, v in vars(optimizer).items() if k != "step"}
    hooks: dict[str, Any] = {k: OrderedDict() for k in attributes if k.endswith("_hooks")}
    vars(block_optimizer).update(attributes, **hooks)
    block_optimizer.param_groups = groups
    return block_optimizer
