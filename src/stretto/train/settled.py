"""One model for a moment: ranks are made whole, and afterwards each has its own buffers again.

Between steps batch statistics are each rank's own. Who evaluates or saves wants one model, but must
leave no trace: a run that was looked at more often, or stopped and resumed, is the same run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from stretto.comm.small import add_up_
from stretto.comm.spread import as_bytes, gather_to_rank_0
from stretto.train.parts import Parts


@contextmanager
def settled(parts: Parts) -> Iterator[Mapping[str, Tensor]]:
    """Make parameters and buffers equal on all ranks inside the block; all ranks enter together.

    Yields:
        This rank's own buffers, by name, which it has again after the block.
    """
    # Every name of a buffer that has several: a checkpoint knows all of them.
    buffers = dict(parts.model.named_buffers(remove_duplicate=False))
    own = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    parts.strategy.settle()
    try:
        yield own
    finally:
        parts.strategy.unsettle()
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(own[name])


def own_of_all_ranks(parts: Parts, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all ranks' own buffers as a checkpoint names them; on rank 0, elsewhere none.

    All ranks call this together, inside `settled`. Only what settling changed on some rank, and
    what the model wants saved: masks and other constants would be there as often as ranks.
    """
    whole = parts.model.state_dict()
    names = [name for name in own if name in whole]
    if not names:
        return {}
    changed = torch.tensor([float(_differ(own[name], whole[name])) for name in names])
    add_up_(changed, parts.channel)
    names = [name for name, num_ranks in zip(names, changed.tolist(), strict=True) if num_ranks]
    if not names:
        return {}
    of_ranks = gather_to_rank_0([own[name] for name in names], parts.channel)
    return {
        f"{own_of_rank(rank)}/{name}": buffer
        for rank, buffers in enumerate(of_ranks)
        for name, buffer in zip(names, buffers, strict=True)
    }


def strategy_of_all_ranks(parts: Parts) -> dict[str, Tensor]:
    """Return what the strategy keeps on each rank, as a checkpoint names it; on rank 0."""
    own = parts.strategy.own_state()
    of_ranks = gather_to_rank_0(list(own.values()), parts.channel) if own else []
    return {
        f"{strategy_of_rank(rank)}/{name}": tensor
        for rank, tensors in enumerate(of_ranks)
        for name, tensor in zip(own, tensors, strict=True)
    }


def strategy_of_rank(rank: int) -> str:
    """Return the part of a checkpoint's names that stands before what a strategy keeps."""
    return f"rank-{rank}/strategy"


def own_of_rank(rank: int) -> str:
    """Return the part of a checkpoint's names that stands before those of a rank's own buffers."""
    return f"rank-{rank}/buffers"


def _differ(one: Tensor, other: Tensor) -> bool:
    # As bytes: -0.0 and 0.0 are equal numbers, and what is not a number equals nothing.
    return not torch.equal(as_bytes([one]), as_bytes([other]))
