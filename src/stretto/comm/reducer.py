"""Sums gradient buckets over ranks while backward is still running.

`Reducer` counts gradients and starts each bucket when it is complete, in one order on every rank.
A `BucketReducer` sums one bucket: plain, encoded before every hop, or by its largest entries only.
`GradientScaling` weigh the gradients of ranks whose local batches differ in size.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from stretto.collectives.algorithm_table import AlgorithmTable
from stretto.collectives.algorithms import doubling, ring_all_gather
from stretto.collectives.codecs import WireFormat
from stretto.comm.bound_schedule import BoundSchedule
from stretto.comm.buckets import Bucket
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.topk_all_reduce import TopKAllReduce
from stretto.comm.transport import Transport, Work
from stretto.errors import StrettoError
from stretto.telemetry.timeline import Recorder, Span


class BucketReducer(Protocol):
    """Sums one bucket over ranks, in every step."""

    def start(self) -> Work:
        """Start the sum of the packed bucket; it must not be touched until `Work.wait` returns."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that this rank keeps from step to step."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors of `state_dict`."""
        ...


def bucket_reducers_for(
    buckets: Sequence[Bucket],
    table: AlgorithmTable,
    wire: WireFormat,
    executor: CollectiveExecutor,
    transport: Transport,
) -> list[BucketReducer]:
    """Return a reducer for each bucket; all ranks call this together, and check every message.

    Args:
        buckets: The buckets, in the order in which they are sent.
        table: The all-reduce algorithm for each message size.
        wire: How gradients are sent.
        executor: Runs the collectives.
        transport: Connects the ranks.
    """
    if wire.codec is None and wire.kept_fraction is None:
        schedules = [table.pick(bucket.num_bytes).schedule(transport.mesh) for bucket in buckets]
        bound_schedules = executor.prepare_all(schedules, [bucket.flat for bucket in buckets])
        return [PlainBucketReducer(executor, bound) for bound in bound_schedules]
    # The flags are counts, which no codec may round, so they have their own small all-reduce.
    gradient_flags = executor.prepare_all(
        [doubling(transport.size)] * len(buckets), [bucket.gradient_flags for bucket in buckets]
    )
    if wire.codec is not None:
        gradient_sums = [
            executor.prepare(
                table.pick(bucket.num_bytes).schedule(transport.mesh), bucket.gradients, wire.codec
            )
            for bucket in buckets
        ]
        executor.check_same_on_all_ranks(*gradient_sums)
        return [
            CodedBucketReducer(executor, gradients, flags)
            for gradients, flags in zip(gradient_sums, gradient_flags, strict=True)
        ]
    gather = ring_all_gather(transport.size)
    kept_fraction = wire.kept_fraction
    assert kept_fraction is not None
    sums = [
        TopKAllReduce(executor, gather, transport.rank, bucket.gradients, kept_fraction)
        for bucket in buckets
    ]
    return [
        SparseBucketReducer(executor, total, flags)
        for total, flags in zip(sums, gradient_flags, strict=True)
    ]


class _Stateless:
    """Base of reducers that keep nothing from step to step."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Ignore ``state``, which is empty."""


class PlainBucketReducer(_Stateless):
    """Sums a bucket as it is, gradients and flags in one message."""

    def __init__(self, executor: CollectiveExecutor, bound: BoundSchedule) -> None:
        self._executor = executor
        self._bound = bound

    def start(self) -> Work:
        """Start the all-reduce of gradients and flags."""
        return self._executor.start(self._bound)


class CodedBucketReducer(_Stateless):
    """Sums gradients that are encoded before every hop, and the flags in a plain all-reduce."""

    def __init__(
        self, executor: CollectiveExecutor, gradients: BoundSchedule, gradient_flags: BoundSchedule
    ) -> None:
        self._executor = executor
        self._gradients = gradients
        self._flags = gradient_flags

    def start(self) -> Work:
        """Start both sums."""
        return _GradientsAndFlagsWork(
            self._executor.start(self._gradients), self._executor.start(self._flags)
        )


class SparseBucketReducer:
    """Sums the largest entries of the gradients, and the flags in a plain all-reduce.

    The entries that were not sent are kept in the residual of the `TopKAllReduce`.
    """

    def __init__(
        self, executor: CollectiveExecutor, total: TopKAllReduce, gradient_flags: BoundSchedule
    ) -> None:
        self._executor = executor
        self._total = total
        self._flags = gradient_flags

    def start(self) -> Work:
        """Start both sums."""
        return _GradientsAndFlagsWork(self._total.start(), self._executor.start(self._flags))

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's residual."""
        return self._total.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore this rank's residual."""
        self._total.load_state_dict(state)


class _GradientsAndFlagsWork:
    """The two sums of one bucket, as one `Work`."""

    def __init__(self, gradients: Work, gradient_flags: Work) -> None:
        self._gradients = gradients
        self._flags = gradient_flags

    def wait(self) -> None:
        """Return when both sums are done."""
        self._gradients.wait()
        self._flags.wait()

    @property
    def finished_s(self) -> float | None:
        """Monotonic time at which the sum of the gradients was done; None before that."""
        return self._gradients.finished_s


# --- the reducer and the weights of gradients ---


class GradientScaling(Protocol):
    """The factor of each rank's gradients, and the divisor of their sum."""

    def begin(self) -> None:
        """Note that the backward of a micro-batch begins."""
        ...

    def start(self, transport: Transport) -> None:
        """Start to sum the divisor over ranks, before the first bucket of the step is sent."""
        ...

    def local_weight(self) -> float:
        """Return the factor of this rank's gradients."""
        ...

    def divisor(self) -> float:
        """Return the divisor of the summed gradients; waits for it if necessary."""
        ...

    def reset(self) -> None:
        """Forget the step; called once all its buckets have been packed and unpacked."""
        ...


class NoScaling:
    """Weights for gradients that are ready to be added: factor and divisor are 1."""

    def begin(self) -> None:
        """Do nothing."""

    def start(self, transport: Transport) -> None:
        """Do nothing."""

    def local_weight(self) -> float:
        """Return one."""
        return 1.0

    def divisor(self) -> float:
        """Return one."""
        return 1.0

    def reset(self) -> None:
        """Do nothing."""


class Reducer:
    """Starts each bucket once its gradients and those of all buckets before it are complete."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        bucket_reducers: Sequence[BucketReducer],
        transport: Transport,
        gradient_scaling: GradientScaling,
        recorder: Recorder,
    ) -> None:
        self._buckets = buckets
        self._transport = transport
        self._gradient_scaling = gradient_scaling
        self._recorder = recorder
        self._bucket_reducers = bucket_reducers
        self._reset()

    def gradient_ready(self, index: int) -> None:
        """Count one more gradient of bucket ``index``, and start the buckets that are complete.

        Called from the hooks of backward, on the thread that runs them.

        Raises:
            StrettoError: The bucket has been sent already.
        """
        self._missing_gradients[index] -= 1
        if self._missing_gradients[index] < 0:
            raise StrettoError(f"a gradient of bucket {index} came after the bucket had been sent")
        self._start_ready_buckets(lambda: self._missing_gradients[len(self._in_flight)] <= 0)

    def finish(
        self, step: int, on_bucket_ready: Callable[[Bucket], None] = lambda _bucket: None
    ) -> None:
        """Start the buckets that backward left incomplete, and wait for all sums.

        A missing gradient counts as zero. ``on_bucket_ready`` is called with each bucket once its
        parameters have the summed gradients, while later buckets are still being summed.
        """
        self._start_ready_buckets(lambda: True)
        with self._recorder.span("wait for gradients", "wait", step=step):
            divisor = self._gradient_scaling.divisor()
            for index, (bucket, work) in enumerate(
                zip(self._buckets, self._in_flight, strict=True)
            ):
                work.wait()
                bucket.unpack(divisor)
                self._record_span(step, index, work)
                on_bucket_ready(bucket)
        self._gradient_scaling.reset()
        self._reset()

    def _reset(self) -> None:
        self._missing_gradients = [len(bucket.parameters) for bucket in self._buckets]
        self._in_flight: list[Work] = []
        self._started_s = [0.0] * len(self._buckets)

    def _start_ready_buckets(self, is_ready: Callable[[], bool]) -> None:
        """Pack and start the next buckets in order, as long as ``is_ready()``.

        This runs in the hook of backward itself: on a busy machine, another thread would wake late.
        """
        while len(self._in_flight) < len(self._buckets) and is_ready():
            if not self._in_flight:
                self._gradient_scaling.start(self._transport)
            index = len(self._in_flight)
            self._buckets[index].pack(self._gradient_scaling.local_weight())
            self._started_s[index] = time.monotonic()
            self._in_flight.append(self._bucket_reducers[index].start())

    def _record_span(self, step: int, index: int, work: Work) -> None:
        started_s = self._started_s[index]
        ended_s = max(started_s, work.finished_s or time.monotonic())
        # Two sums may be in flight at once, so neighbouring buckets are drawn on different lanes.
        lane, num_bytes = f"comm {index % 2}", self._buckets[index].num_bytes
        self._recorder.add(Span(f"bucket {index}", lane, started_s, ended_s, step, num_bytes))


class SampleCountScaling:
    """Weights for a user's own loop, whose loss is a mean over a local batch of any size.

    Rank i has the weight n_i / sum n, with n_i the samples of its step. A forward hook counts the
    samples, and the counts are summed during backward. Gradients are multiplied by n_i over the
    total of the *previous* step, which all ranks know. These factors are near 1/ranks, so a
    16-bit wire does not overflow. The divisor corrects them to the current total.
    """

    def __init__(self, model: nn.Module) -> None:
        self._batch_samples = 0
        self._step_samples = 0
        self._previous_total: float | None = None
        self._count = torch.zeros(1, dtype=torch.float64)
        self._sum_work: Work | None = None
        model_ref = weakref.ref(model)

        # A function, not a method: a copy of the model must not copy this object too.
        def count_samples(
            module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
        ) -> None:
            if module is model_ref() and torch.is_grad_enabled():
                self._batch_samples = _batch_size([*inputs, *named.values()])

        model.register_forward_pre_hook(count_samples, with_kwargs=True)

    def begin(self) -> None:
        """Add the samples of the latest forward, whose backward begins now.

        Raises:
            StrettoError: The model has not been called with a batch.
        """
        if not self._batch_samples:
            raise StrettoError(
                "gradients arrive, but the model was not called with a batch: call it as "
                "model(inputs), with tensors whose first dimension counts samples"
            )
        self._step_samples += self._batch_samples

    def start(self, transport: Transport) -> None:
        """Start to sum this step's samples over ranks."""
        self._count.fill_(self._step_samples)
        self._sum_work = transport.start_all_reduce(self._count)
        if self._previous_total is None:  # in the first step there is no previous total
            self._sum_work.wait()
            self._previous_total = max(1.0, float(self._count))

    def local_weight(self) -> float:
        """Return this rank's samples over the total of the previous step."""
        return self._step_samples / (self._previous_total or 1.0)

    def divisor(self) -> float:
        """Return the samples of all ranks over the total of the previous step."""
        if self._sum_work is None:  # the model has no trainable parameters
            return 1.0
        self._sum_work.wait()
        return max(1.0, float(self._count)) / (self._previous_total or 1.0)

    def reset(self) -> None:
        """Reset the count, once every bucket of the step has been packed with it."""
        self._step_samples = 0
        self._previous_total = max(1.0, float(self._count)) if self._sum_work else None


def _batch_size(values: Iterable[object]) -> int:
    """Return the first dimension of the first tensor, also inside lists and dicts; 0 if none."""
    for value in values:
        size = 0
        if isinstance(value, Tensor):
            size = value.shape[0] if value.ndim else 0
        elif isinstance(value, Mapping):
            size = _batch_size(value.values())
        elif isinstance(value, list | tuple):
            size = _batch_size(value)
        if size:
            return size
    return 0
