"""Gradients of one segment, from backward until its update: of a rank or summed over its group.

Until its update a segment's gradients are stashed away from ``parameter.grad``. The optimizer steps
one segment at a time and must not find gradients of others.
"""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from stretto.collectives.algorithms.ring import ring_in_groups
from stretto.comm.bound_schedule import BoundSchedule
from stretto.comm.buckets import Bucket
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.transport import CompletedWork, Work
from stretto.strategies.gossip.groups import GossipRoute, RankGroup
from stretto.strategies.gossip.mixer import DifferenceMixer, PeersOfRound


class SegmentGradients:
    """This rank's gradients of a segment, times a factor."""

    def __init__(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        self._parameters = parameters
        self._factor = factor
        self._stashed: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Begin a step: drop stashed gradients."""
        self._stashed.clear()

    def stash(self, parameter: Tensor) -> None:
        """Move a gradient to the stash, adding it to that of earlier micro-batches."""
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        earlier = self._stashed.get(id(parameter))
        self._stashed[id(parameter)] = grad if earlier is None else earlier.add_(grad)

    def stash_all(self) -> None:
        """Move the gradients of earlier micro-batches to the stash."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self.stash(parameter)

    def start(self) -> Work:
        """Start to reduce the gradients, once a step; here there is nothing to reduce."""
        return CompletedWork(time.monotonic())

    def install(self) -> None:
        """Set the parameters' gradients for the update, after the work of `start` has finished."""
        self._unstash()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self._factor)

    def available(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield parameters with their gradients, stashed or not, as far as they exist."""
        for parameter in self._parameters:
            grad = self._stashed.get(id(parameter), parameter.grad)
            if grad is not None:
                yield parameter, grad

    def _unstash(self) -> None:
        for parameter in self._parameters:
            parameter.grad = self._stashed.pop(id(parameter), parameter.grad)


class GroupSummedGradients(SegmentGradients):
    """Gradients of a segment summed over a group, times a factor; equal bits on all members."""

    def __init__(
        self, bucket: Bucket, factor: float, executor: CollectiveExecutor, bound: BoundSchedule
    ) -> None:
        super().__init__(bucket.parameters, factor)
        self._bucket = bucket
        self._executor, self._bound = executor, bound

    def start(self) -> Work:
        """Start the sum; the parameters have no gradients until `install`."""
        self._unstash()
        self._bucket.pack(self._factor)
        return self._executor.start(self._bound)

    def install(self) -> None:
        """Set the parameters' gradients to the sums."""
        self._bucket.unpack()


def make_segment_gradients(
    segments: Sequence[Sequence[nn.Parameter]],
    factor: float,
    group: RankGroup,
    executor: CollectiveExecutor,
    lane: int,
) -> list[SegmentGradients]:
    """Return the gradients of each segment (collective: ranks prepare schedules together)."""
    if group.width == 1:
        return [SegmentGradients(segment, factor) for segment in segments]
    buckets = [Bucket(segment, None) for segment in segments]
    schedule = ring_in_groups(group.width * group.count, group.width, lane)
    bound_schedules = executor.prepare_all(
        [schedule] * len(buckets), [bucket.flat for bucket in buckets]
    )
    return [
        GroupSummedGradients(bucket, factor, executor, bound)
        for bucket, bound in zip(buckets, bound_schedules, strict=True)
    ]


class GradientMixer(DifferenceMixer):
    """Averages a segment's gradients with those of peers before its update.

    Behind the gradients a has-gradient flag is sent for each parameter. A parameter without a
    gradient on any of the ranks gets none and is not updated.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        wire: torch.dtype | None,
        peers_of: PeersOfRound,
        route: GossipRoute,
    ) -> None:
        self._parameters = parameters
        self._NUM_EXTRA = len(parameters)
        super().__init__(parameters, wire, peers_of, route)

    def _values_to_send(self) -> list[Tensor]:
        grads = [parameter.grad for parameter in self._parameters]
        pairs = zip(self.values, grads, strict=True)
        present = [torch.zeros_like(value) if grad is None else grad for value, grad in pairs]
        return [*present, self._template.new_tensor([grad is not None for grad in grads])]

    def _apply(self, change: Tensor) -> None:
        any_has_gradient = change[-self._NUM_EXTRA :] > 0
        changes = zip(self._parameters, self._views(change), any_has_gradient, strict=True)
        for parameter, gradient_change, group_has_gradient in changes:
            if parameter.grad is not None:
                parameter.grad.add_(gradient_change)
            elif group_has_gradient:
                parameter.grad = gradient_change.clone()
