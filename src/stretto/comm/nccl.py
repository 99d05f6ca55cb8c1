"""Ranks as processes with a GPU each: a channel over NCCL.

Note: lanes, communicators and streams. Each lane has a communicator of its own, made by all ranks
together before its first message (`reserve`), and messages of a round are one coalesced call on it.
Nothing here waits on the host: a call is queued on the stream that is current, and what follows
on that stream comes after it. Tensors that are not on the GPU go over Gloo beside it.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    Backend,
    PrefixStore,
    ReduceOp,
    ReduceScatterOptions,
    Store,
    Work,
)

from stretto.cluster.world import Mesh
from stretto.comm.channel import Channel, Parcel, Pending
from stretto.comm.gloo import in_plain_words
from stretto.comm.watchman import Watchman
from stretto.errors import ChannelError, ConfigError

_NATIVE = "NCCL's own sum"
_PATIENCE = 3
"""NCCL's own time-out is so many times ours: ours is told first, with the collective's name."""


class NcclChannel:
    """This process's end of a group of GPUs; made by `open_nccl`."""

    def __init__(
        self, beside: Channel, open_lane: Callable[[int], Backend], watchman: Watchman
    ) -> None:
        self._beside = beside
        self._open_lane = open_lane
        self._watchman = watchman
        self._lanes: list[Any] = []
        self._sum = AllreduceOptions()  # made once: for a small message it is a part of the time
        self._sum.reduceOp = ReduceOp(ReduceOp.SUM)
        self._scatter = ReduceScatterOptions()
        self._scatter.reduceOp = ReduceOp(ReduceOp.SUM)
        self._gather = AllgatherOptions()
        self.reserve(1)

    @property
    def rank(self) -> int:
        """My place in the group."""
        return self._beside.rank

    @property
    def size(self) -> int:
        """Number of members."""
        return self._beside.size

    @property
    def mesh(self) -> Mesh:
        """Which members share a host."""
        return self._beside.mesh

    def reserve(self, lanes: int) -> None:
        """Open communicators up to ``lanes``; all ranks together."""
        while len(self._lanes) < lanes:
            self._lanes.append(self._open_lane(len(self._lanes)))

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Queue everything as one call on the current stream; all parcels are of one lane."""
        parcels = [*sends, *receives]
        if not parcels:
            return
        if not parcels[0].tensor.is_cuda:
            self._beside.exchange(sends, receives)
            return
        group = self._lanes[parcels[0].lane]
        try:
            group._start_coalescing()
            for peer, tensor, _ in receives:
                group.recv([tensor], peer, 0)
            for peer, tensor, _ in sends:
                group.send([tensor], peer, 0)
            group._end_coalescing().wait()
        except RuntimeError as failure:
            raise self._lost(failure) from failure

    def hear(self, parcel: Parcel) -> None:
        """Hear over Gloo: on a GPU nothing may wait for who knows how long."""
        self._beside.hear(parcel)

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Begin the back end's own sum."""
        if not tensor.is_cuda:
            return self._beside.start_all_reduce(tensor)
        try:
            work = self._lanes[0].allreduce([tensor], self._sum)
        except RuntimeError as failure:
            raise self._lost(failure) from failure
        self.watch(_NATIVE, work.is_completed)
        return _Queued(work, self._lost)

    def start_reduce_scatter(self, tensor: Tensor, lane: int = 0) -> Pending:
        """Begin the back end's own sum of chunks: rank r's part of ``tensor`` becomes the sum."""
        mine = self._chunk(tensor)
        return self._start("reduce_scatter", lane, mine, tensor, self._scatter)

    def start_all_gather(self, tensor: Tensor, lane: int = 0) -> Pending:
        """Begin the back end's own gather: ``tensor`` becomes every rank's part of it."""
        mine = self._chunk(tensor)
        return self._start("allgather", lane, tensor, mine, self._gather)

    def _chunk(self, tensor: Tensor) -> Tensor:
        length = tensor.numel() // self.size
        return tensor[self.rank * length : (self.rank + 1) * length]

    def _start(
        self, name: str, lane: int, output: Tensor, source: Tensor, options: object
    ) -> Pending:
        group = self._lanes[lane]
        call = getattr(group, f"_{name}_base", None) or getattr(group, f"{name}_single")
        try:
            work = call(output, source, options)
        except RuntimeError as failure:
            raise self._lost(failure) from failure
        self.watch(f"NCCL's own {name}", work.is_completed)
        return _Queued(work, self._lost)

    def watch(self, what: str, over: Callable[[], bool]) -> None:
        """End the process, with a name, if it is not over within the time-out."""
        self._watchman.watch(what, over)

    def close(self) -> None:
        """Leave the group; what is queued is finished first, if it can be."""
        if not self._watchman.endless:
            torch.cuda.synchronize()
            for group in self._lanes:
                group.shutdown()
        self._beside.close()

    def _lost(self, failure: RuntimeError) -> ChannelError:
        """Return what NCCL's refusal means; the process will not wait for the GPU any more."""
        self._watchman.endless = True
        return ChannelError(f"rank {self.rank}: NCCL gave up: {in_plain_words(str(failure))}")


class _Queued:
    """A native sum on its way through NCCL's stream."""

    def __init__(self, work: Work, lost: Callable[[RuntimeError], ChannelError]) -> None:
        self._work = work
        self._lost = lost
        self.finished_s: float | None = None

    def wait(self) -> None:
        """Let the current stream wait for the sum; the host goes on."""
        try:
            self._work.wait()
        except RuntimeError as failure:
            raise self._lost(failure) from failure


def open_nccl(store: Store, beside: Channel, device: torch.device, timeout_s: float) -> NcclChannel:
    """Build a group over NCCL for the members of ``beside``; every member calls this together."""
    nccl: Any = getattr(_distributed_c10d, "ProcessGroupNCCL", None)
    if nccl is None or not torch.cuda.is_available():
        raise ConfigError(
            "this PyTorch has no NCCL, or there is no GPU: take device cpu, or a build with CUDA"
        )

    def open_lane(lane: int) -> Backend:
        options = nccl.Options()
        options._timeout = timedelta(seconds=_PATIENCE * timeout_s)
        group = nccl(PrefixStore(f"lane/{lane}", store), beside.rank, beside.size, options)
        group.eager_connect_single_device(device)
        opened: Backend = group
        return opened

    return NcclChannel(beside, open_lane, Watchman(beside.rank, timeout_s))
