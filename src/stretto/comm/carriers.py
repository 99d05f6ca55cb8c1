"""How each bucket travels: as it is, encoded hop by hop, or its largest entries only."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from stretto.comm.algorithms import doubling, ring_all_gather
from stretto.comm.algorithms.table import AlgorithmTable
from stretto.comm.buckets import Bucket
from stretto.comm.channel import Channel, Pending
from stretto.comm.codecs import Wire
from stretto.comm.codecs.sparse import SparseSum
from stretto.comm.courier import Courier
from stretto.comm.errand import Errand


class Carrier(Protocol):
    """Carries one bucket, step after step."""

    def start(self) -> Pending:
        """Begin to sum what is packed; the bucket is the carrier's until it is waited for."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return what this rank keeps from step to step."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take it back."""
        ...


def carriers_for(
    buckets: Sequence[Bucket], table: AlgorithmTable, wire: Wire, courier: Courier, channel: Channel
) -> list[Carrier]:
    """Return a carrier for each bucket; all ranks together: they agree on every message here."""
    if wire.codec is None and wire.share is None:
        schedules = [table.pick(bucket.num_bytes).schedule(channel.mesh) for bucket in buckets]
        errands = courier.prepare_all(schedules, [bucket.flat for bucket in buckets])
        return [Plain(courier, errand) for errand in errands]
    # Marks are counts: no codec may round them, so they travel beside the gradients.
    marks = courier.prepare_all(
        [doubling(channel.size)] * len(buckets), [bucket.marks for bucket in buckets]
    )
    if wire.codec is not None:
        bodies = [
            courier.prepare(
                table.pick(bucket.num_bytes).schedule(channel.mesh), bucket.body, wire.codec
            )
            for bucket in buckets
        ]
        courier.agree(*bodies)
        return [Coded(courier, body, mark) for body, mark in zip(bodies, marks, strict=True)]
    gather = ring_all_gather(channel.size)
    share = wire.share
    assert share is not None
    sums = [SparseSum(courier, gather, channel.rank, bucket.body, share) for bucket in buckets]
    return [Sparse(courier, total, mark) for total, mark in zip(sums, marks, strict=True)]


class _Stateless:
    """Keeps nothing from step to step."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Accept nothing."""


class Plain(_Stateless):
    """The bucket as it is, marks and all."""

    def __init__(self, courier: Courier, errand: Errand) -> None:
        self._courier = courier
        self._errand = errand

    def start(self) -> Pending:
        """Begin the sum."""
        return self._courier.start(self._errand)


class Coded(_Stateless):
    """Gradients encoded before every hop, marks plainly beside them."""

    def __init__(self, courier: Courier, body: Errand, marks: Errand) -> None:
        self._courier = courier
        self._body = body
        self._marks = marks

    def start(self) -> Pending:
        """Begin both sums."""
        return _Both(self._courier.start(self._body), self._courier.start(self._marks))


class Sparse:
    """The largest entries, marks plainly beside them; what was not sent is kept."""

    def __init__(self, courier: Courier, total: SparseSum, marks: Errand) -> None:
        self._courier = courier
        self._total = total
        self._marks = marks

    def start(self) -> Pending:
        """Begin both sums."""
        return _Both(self._total.start(), self._courier.start(self._marks))

    def state_dict(self) -> dict[str, Tensor]:
        """Return what is left to be sent."""
        return self._total.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from it."""
        self._total.load_state_dict(state)


class _Both:
    """Gradients and marks of one bucket."""

    def __init__(self, body: Pending, marks: Pending) -> None:
        self._body = body
        self._marks = marks

    def wait(self) -> None:
        """Return when both are there."""
        self._body.wait()
        self._marks.wait()

    @property
    def finished_s(self) -> float | None:
        """When the gradients were."""
        return self._body.finished_s
