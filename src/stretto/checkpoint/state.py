"""What a checkpoint holds: named tensors, plain facts and the step they belong to."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Everything a run needs to go on as if it had never stopped."""

    step: int
    """Optimizer updates done when this state was taken."""
    tensors: Mapping[str, Tensor]
    """By name; the part before the first slash says whose: ``model/fc.weight``."""
    facts: Mapping[str, Any]
    """JSON values: optimizer groups, seed, data position, world size, config digest."""

    def under(self, owner: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with ``owner/``, without that beginning."""
        prefix = f"{owner}/"
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }


@dataclass(frozen=True, slots=True)
class Saved:
    """What one save cost, and where its result lies."""

    path: Path
    num_bytes: int
    """Of all files, manifest included."""
    seconds: float
