"""What a model must not do when its parameters come and go; whoever does it is told, by name."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from stretto.errors import ConfigError, StrettoError
from stretto.plan.units import ModelUnit


def refuse_shared_storage(units: Sequence[ModelUnit]) -> None:
    """Refuse parameters that are different objects in the same memory: each would get its own.

    Raises:
        ConfigError: Names the two.
    """
    spans: list[tuple[int, int, str]] = []
    for unit in units:
        for name, parameter in zip(unit.names, unit.parameters, strict=True):
            start = parameter.data_ptr()
            spans.append((start, start + _extent(parameter), name))
    spans.sort()
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise ConfigError(
                f"parameters {name} and {other} share memory but are two objects: sharded, each "
                "would go its own way; make them one nn.Parameter that both modules hold"
            )


def _extent(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to behind its last."""
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


class Owners:
    """Where the model holds each parameter; it must go on to hold the same ones."""

    def __init__(self, model: nn.Module, units: Sequence[ModelUnit]) -> None:
        mine = {id(p) for unit in units for p in unit.parameters}
        self._places = [
            (module, key, parameter, f"{prefix}.{key}".lstrip("."))
            for prefix, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if id(parameter) in mine
        ]

    def check(self) -> None:
        """See that nobody has put another parameter in the place of one of ours.

        Raises:
            StrettoError: Names it.
        """
        for module, key, parameter, name in self._places:
            if module._parameters.get(key) is not parameter:
                raise StrettoError(
                    f"parameter {name} was replaced after the model was distributed: nobody would "
                    "gather, reduce or update the new one; replace it before, or write into it "
                    "(copy_) between settle and the next step"
                )
