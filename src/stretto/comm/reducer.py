"""Sums buckets over ranks while backward goes on, in one order on every rank."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from stretto.comm.buckets import Bucket
from stretto.comm.carriers import Carrier
from stretto.comm.channel import Channel, Pending
from stretto.errors import StrettoError
from stretto.telemetry.timeline import Recorder, Span


class Weights(Protocol):
    """What a rank's gradients are multiplied by, and what the sum is divided by."""

    def begin(self) -> None:
        """Note that a micro-batch begins."""
        ...

    def start(self, channel: Channel) -> None:
        """Begin to agree on the divisor, before a step's first bucket leaves."""
        ...

    def mine(self) -> float:
        """This rank's factor."""
        ...

    def total(self) -> float:
        """The divisor; waits for it if need be."""
        ...

    def reset(self) -> None:
        """Forget the step, all of whose buckets have been packed and unpacked."""
        ...


class Summed:
    """Gradients arrive ready to be added: nothing to multiply, divide or agree on."""

    def begin(self) -> None:
        """Note nothing."""

    def start(self, channel: Channel) -> None:
        """Send nothing."""

    def mine(self) -> float:
        """Return one."""
        return 1.0

    def total(self) -> float:
        """Return one."""
        return 1.0

    def reset(self) -> None:
        """Forget nothing."""


class Reducer:
    """Counts gradients in, starts each bucket when it and all before it are complete."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        carriers: Sequence[Carrier],
        channel: Channel,
        weights: Weights,
        recorder: Recorder,
    ) -> None:
        self._buckets = buckets
        self._channel = channel
        self._weights = weights
        self._recorder = recorder
        self._carriers = carriers
        self._reset()

    def gradient_ready(self, index: int) -> None:
        """Note one more gradient of bucket ``index``; called from backward's hooks."""
        self._missing[index] -= 1
        if self._missing[index] < 0:
            raise StrettoError(f"a gradient of bucket {index} came after the bucket had left")
        self._start(lambda: self._missing[len(self._under_way)] <= 0)

    def finish(self, step: int, use: Callable[[Bucket], None] = lambda _bucket: None) -> None:
        """Start what backward left unsent (absent gradients count as zero), wait for all sums.

        ``use`` is called with each bucket as soon as its sums have become gradients, while later
        buckets are still on their way.
        """
        self._start(lambda: True)
        with self._recorder.span("wait for gradients", "wait", step=step):
            total = self._weights.total()
            for index, (bucket, pending) in enumerate(
                zip(self._buckets, self._under_way, strict=True)
            ):
                pending.wait()
                bucket.unpack(total)
                self._note(step, index, pending)
                use(bucket)
        self._weights.reset()
        self._reset()

    def _reset(self) -> None:
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._under_way: list[Pending] = []
        self._started_s = [0.0] * len(self._buckets)

    def _start(self, ready: Callable[[], bool]) -> None:
        """Lay out and start every bucket whose turn has come; right here, in backward's hook.

        A thread that must be woken to do it is late on a busy machine.
        """
        while len(self._under_way) < len(self._buckets) and ready():
            if not self._under_way:
                self._weights.start(self._channel)
            index = len(self._under_way)
            self._buckets[index].pack(self._weights.mine())
            self._started_s[index] = time.monotonic()
            self._under_way.append(self._carriers[index].start())

    def _note(self, step: int, index: int, pending: Pending) -> None:
        started_s = self._started_s[index]
        ended_s = max(started_s, pending.finished_s or time.monotonic())
        # Two sums may be in flight: neighbours are drawn on lanes of their own.
        lane, num_bytes = f"comm {index % 2}", self._buckets[index].num_bytes
        self._recorder.add(Span(f"bucket {index}", lane, started_s, ended_s, step, num_bytes))
