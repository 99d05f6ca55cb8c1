"""The gradients of one segment, from backward until it is updated: a rank's own, or its group's.

Until then they are out of sight: who steps for one segment must find no other's.
"""

import time
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from stretto.comm.algorithms.in_groups import ring_in_groups
from stretto.comm.buckets import Bucket
from stretto.comm.channel import Finished, Pending
from stretto.comm.courier import Courier
from stretto.comm.errand import Errand
from stretto.strategy.gossip.group import Group


class Gradients:
    """A rank's own, times a factor."""

    def __init__(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        self._parameters = parameters
        self._factor = factor
        self._hidden: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Forget those of the step before."""
        self._hidden.clear()

    def hide(self, parameter: Tensor) -> None:
        """Put a gradient out of sight, added to what earlier micro-batches had."""
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        earlier = self._hidden.get(id(parameter))
        self._hidden[id(parameter)] = grad if earlier is None else earlier.add_(grad)

    def hide_all(self) -> None:
        """Put those of earlier micro-batches out of sight."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self.hide(parameter)

    def start(self) -> Pending:
        """Begin to make them those that the update is made by; once a step."""
        return Finished(time.monotonic())

    def give(self) -> None:
        """Make those the parameters' gradients, once what was started is over."""
        self._show()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self._factor)

    def found(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield parameters with the gradients that there are by now."""
        for parameter in self._parameters:
            grad = self._hidden.get(id(parameter), parameter.grad)
            if grad is not None:
                yield parameter, grad

    def _show(self) -> None:
        for parameter in self._parameters:
            parameter.grad = self._hidden.pop(id(parameter), parameter.grad)


class SummedGradients(Gradients):
    """The sum over the members of a group, times a factor; the same bits on all of them."""

    def __init__(self, bucket: Bucket, factor: float, courier: Courier, errand: Errand) -> None:
        super().__init__(bucket.parameters, factor)
        self._bucket = bucket
        self._courier, self._errand = courier, errand

    def start(self) -> Pending:
        """Begin the sum; the parameters have no gradients until `give`."""
        self._show()
        self._bucket.pack(self._factor)
        return self._courier.start(self._errand)

    def give(self) -> None:
        """Make the sums the parameters' gradients."""
        self._bucket.unpack()


def gradients_of(
    segments: Sequence[Sequence[nn.Parameter]],
    factor: float,
    group: Group,
    courier: Courier,
    lane: int,
) -> list[Gradients]:
    """Return those of each segment; all ranks together: they agree on every message here."""
    if group.width == 1:  # nothing is added to a rank's own: they stay where backward put them
        return [Gradients(segment, factor) for segment in segments]
    buckets = [Bucket(segment, None) for segment in segments]
    schedule = ring_in_groups(group.width * group.count, group.width, lane)
    errands = courier.prepare_all([schedule] * len(buckets), [bucket.flat for bucket in buckets])
    return [
        SummedGradients(bucket, factor, courier, errand)
        for bucket, errand in zip(buckets, errands, strict=True)
    ]
