"""Runs bound schedules in the order of submission: one thread for each lane, on a GPU one stream.

Why there is no deadlock: a lane runs its stages strictly in the order in which schedules were
submitted, whatever happens on this rank. No stage waits for a schedule submitted later. So ranks
that submit in the same order always agree on the next message. Two schedules may still overlap: one
in its last phase on one lane, the next in its first phase on another.

`CollectiveExecutor` is for repeated use; `execute` runs one schedule once.
"""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from stretto.collectives.codecs import Codec
from stretto.collectives.schedule import Schedule
from stretto.comm.bound_schedule import BoundSchedule, BufferPool, Stage, bind
from stretto.comm.transport import CompletedWork, Transport, Work, all_gather_text
from stretto.errors import ScheduleError, StrettoError, TransportError


class StreamWork:
    """A schedule queued on the GPU; `wait` makes the current stream wait, not the host."""

    def __init__(self, ends: list[torch.cuda.Event]) -> None:
        self._ends = ends
        self.finished_s: float | None = None
        """Always None: the host does not know without a query to the GPU."""

    def wait(self) -> None:
        """Order everything queued on the current stream from now on after the schedule."""
        stream = torch.cuda.current_stream()
        for end in self._ends:
            stream.wait_event(end)

    def query(self) -> bool:
        """Return whether the GPU has finished the schedule; does not block."""
        return all(end.query() for end in self._ends)


class StreamLanes:
    """The lanes of one GPU: each is a CUDA stream, and events keep the order between lanes."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lanes: dict[int, torch.cuda.Stream] = {}

    def start(self, bound: BoundSchedule) -> StreamWork:
        """Queue every stage on its lane's stream, in program order, without blocking the host."""
        ready = torch.cuda.current_stream().record_event()
        done: dict[int, torch.cuda.Event] = {}
        last: dict[int, torch.cuda.Event] = {}
        for stage in bound.stages:
            stream = self._stream(stage.lane)
            if stage.lane not in last:
                stream.wait_event(ready)
            for needed in stage.waits_for:
                stream.wait_event(done[needed])
            with torch.cuda.stream(stream):
                stage.run(self._transport)
            done[stage.index] = last[stage.lane] = stream.record_event()
        running = StreamWork(list(last.values()))
        self._transport.watch_for_timeout(bound.layout, running.query)
        return running

    def _stream(self, lane: int) -> torch.cuda.Stream:
        if lane not in self._lanes:
            self._lanes[lane] = torch.cuda.Stream()
        return self._lanes[lane]


class RunningSchedule:
    """The `Work` of a schedule that lane threads run; done when its last stage is done."""

    def __init__(self, bound: BoundSchedule) -> None:
        self.bound = bound
        self.finished_s: float | None = None
        self._stages_left = len(bound.stages)
        self._lock = threading.Lock()
        self._completed = threading.Event()
        self._failure: BaseException | None = None
        awaited_stages = {index for stage in bound.stages for index in stage.waits_for}
        self._stage_done = {index: threading.Event() for index in awaited_stages}

    def wait(self) -> None:
        """Return when the schedule is done; raise the first failure of any of its lanes."""
        self._completed.wait()
        if self._failure is not None:
            raise self._failure

    def run(self, stage: Stage, transport: Transport) -> None:
        """Run one stage once the stages it depends on are done; called on the lane's thread."""
        for needed in stage.waits_for:
            self._stage_done[needed].wait()
        if self._failure is not None:
            return
        try:
            stage.run(transport)
        except BaseException as failure:  # noqa: BLE001 - raised again by `wait`
            self.fail(failure)
            return
        if stage.index in self._stage_done:
            self._stage_done[stage.index].set()
        with self._lock:
            self._stages_left -= 1
            if not self._stages_left:
                self.finished_s = time.monotonic()
                self._completed.set()

    def fail(self, failure: BaseException) -> None:
        """Record the failure and end every wait: of callers, and of stages on other lanes."""
        self._failure = self._failure or failure
        for done in self._stage_done.values():
            done.set()
        self._completed.set()

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the schedule; None if there is none."""
        return self._failure


class CollectiveExecutor:
    """Owns the lane threads; `close` ends them once everything submitted has run.

    With ``free_idle_buffers``, receive buffers have memory only while their lane is busy. Without
    it, nothing is allocated after the last `prepare`.
    """

    def __init__(self, transport: Transport, *, free_idle_buffers: bool = False) -> None:
        self._transport = transport
        self._buffer_pool = BufferPool(free_idle=free_idle_buffers)
        self._checked_layouts: set[str] = set()
        self._lanes: dict[int, _LaneThread] = {}
        self._streams: StreamLanes | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        self.close()

    def prepare(
        self, schedule: Schedule, tensor: Tensor, codec: Codec | None = None
    ) -> BoundSchedule:
        """Bind ``schedule`` to ``tensor``; the result can be run any number of times.

        Every message is encoded by ``codec``, if there is one.

        Raises:
            ScheduleError: The schedule is for another number of ranks, or does not fit the tensor
                or the codec.
        """
        if self._transport.size != schedule.size:
            raise ScheduleError(
                f"{schedule.name} was made for {schedule.size} ranks, the transport has "
                f"{self._transport.size}"
            )
        with self._buffer_pool.hold_for_binding():
            return bind(schedule, tensor, self._transport.rank, self._buffer_pool, codec)

    def prepare_all(
        self, schedules: Sequence[Schedule], tensors: Sequence[Tensor]
    ) -> list[BoundSchedule]:
        """Bind each schedule to its tensor, and check that all ranks did the same."""
        pairs = list(enumerate(zip(schedules, tensors, strict=True)))
        bound_schedules: dict[int, BoundSchedule] = {}
        # The largest first: it decides the size of the receive buffers, which then never grow.
        for index, (schedule, tensor) in sorted(pairs, key=lambda pair: -pair[1][1].nbytes):
            bound_schedules[index] = self.prepare(schedule, tensor)
        ordered = [bound_schedules[index] for index, _ in pairs]
        self.check_same_on_all_ranks(*ordered)
        return ordered

    def check_same_on_all_ranks(self, *bound_schedules: BoundSchedule) -> None:
        """Check that all ranks bound the same schedules to tensors of the same size and type.

        All ranks call this together, before the first start. A back end that is given tensors of
        different sizes aborts the process or corrupts memory.

        Raises:
            TransportError: The ranks differ.
        """
        new = {b.layout: b for b in bound_schedules if b.layout not in self._checked_layouts}
        if self._transport.size == 1 or not new:
            return
        lanes = max(lane + 1 for bound in new.values() for lane in (*bound.lanes, 0))
        texts = all_gather_text("\n".join([str(lanes), *new]), self._transport)
        _check_equal_layouts([text.partition("\n")[2] for text in texts])
        self._transport.reserve(max(int(text.partition("\n")[0]) for text in texts))
        self._checked_layouts.update(new)

    def start(self, bound: BoundSchedule) -> Work:
        """Start ``bound`` and return; the tensor must not be touched until `Work.wait` returns."""
        if self._closed:
            raise StrettoError("cannot start a collective: the executor has been closed")
        self.check_same_on_all_ranks(bound)
        if bound.schedule.native:
            return self._transport.start_all_reduce(bound.flat)
        if not bound.stages:
            return CompletedWork(time.monotonic())
        if bound.flat.is_cuda:
            self._streams = self._streams or StreamLanes(self._transport)
            return self._streams.start(bound)
        running = RunningSchedule(bound)
        for lane in bound.lanes:
            if lane not in self._lanes:
                self._lanes[lane] = _LaneThread(lane, self._transport, self._buffer_pool)
            self._lanes[lane].submit(running)
        return running

    def run(self, bound: BoundSchedule) -> None:
        """Run ``bound`` to its end; in the caller's thread if the executor is idle."""
        is_busy = any(lane.is_busy for lane in self._lanes.values())
        needs_other_threads = bound.flat.is_cuda or bound.schedule.native or len(bound.lanes) != 1
        if is_busy or self._closed or needs_other_threads:
            self.start(bound).wait()
            return
        self.check_same_on_all_ranks(bound)
        (lane,) = bound.lanes
        self._buffer_pool.open(lane)
        try:
            for stage in bound.stages:
                stage.run(self._transport)
        finally:
            self._buffer_pool.close(lane)

    def close(self) -> None:
        """End the threads once the queued schedules have run; may be called again."""
        self._closed = True
        for lane in self._lanes.values():
            lane.close()


class _LaneThread:
    """One thread that runs the stages of one lane."""

    def __init__(self, number: int, transport: Transport, buffer_pool: BufferPool) -> None:
        self._number = number
        self._transport = transport
        self._buffer_pool = buffer_pool
        self._queue: queue.SimpleQueue[RunningSchedule | None] = queue.SimpleQueue()
        self._submitted = self._finished = 0
        self._earlier_failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run_loop, name=f"collective-lane-{number}", daemon=True
        )
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a submitted schedule is not done yet."""
        return self._submitted != self._finished

    def submit(self, running: RunningSchedule) -> None:
        self._submitted += 1
        self._queue.put(running)

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run_loop(self) -> None:
        while (running := self._queue.get()) is not None:
            if self._earlier_failure is not None:
                running.fail(self._earlier_failure)  # our messages no longer match the peers'
            if running.bound.needs_buffers:
                self._buffer_pool.open(self._number)
            else:
                self._buffer_pool.close(self._number)
            for stage in running.bound.stages:
                if stage.lane == self._number:
                    running.run(stage, self._transport)
            self._earlier_failure = self._earlier_failure or running.failure
            if self._queue.empty():
                self._buffer_pool.close(self._number)
            self._finished += 1


def _check_equal_layouts(layouts: list[str]) -> None:
    for rank, layout in enumerate(layouts):
        if layout != layouts[0]:
            pairs = zip(layouts[0].splitlines(), layout.splitlines(), strict=False)
            first, other = next((p for p in pairs if p[0] != p[1]), (layouts[0], layout))
            raise TransportError(
                f"ranks disagree on the next collective: rank 0 begins {first}, "
                f"rank {rank} {other}; every rank must call the same collectives with tensors of "
                "one size and type"
            )


@torch.no_grad()
def execute(schedule: Schedule, tensor: Tensor, transport: Transport) -> None:
    """Run ``schedule`` once on the contiguous ``tensor``, in place; all ranks call this together.

    To run a schedule often, keep a `CollectiveExecutor`.
    """
    with CollectiveExecutor(transport) as executor:
        executor.run(executor.prepare(schedule, tensor))
