"""Timing collectives against each other: ours, by algorithm, and the back end's own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.comm.algorithms import ALL_GATHER, ALLREDUCE, BROADCAST, REDUCE_SCATTER, Algorithm
from stretto.comm.algorithms.table import parse_word
from stretto.comm.channel import Channel
from stretto.comm.codecs import parse_wire
from stretto.comm.courier import Courier
from stretto.errors import ConfigError
from stretto.measure.interleave import interleave

COLLECTIVES: Mapping[str, Mapping[str, Algorithm]] = {
    "allreduce": ALLREDUCE,
    "reduce-scatter": REDUCE_SCATTER,
    "all-gather": ALL_GATHER,
    "broadcast": BROADCAST,
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One collective over one number of bytes, on one kind of memory."""

    collective: str
    num_bytes: int
    wire: str = "own"
    device: str = "cpu"

    @property
    def repeat(self) -> int:
        """Calls that are timed as one: short ones together, so that the clock is no part of it."""
        small, medium, large = (100, 50, 10) if self.device == "cuda" else (60, 10, 1)
        return small if self.num_bytes <= 64_000 else medium if self.num_bytes <= 1e6 else large

    def tensor(self) -> Tensor:
        """Return zeros: sums of them stay what they are, however often they are summed."""
        return torch.zeros(max(1, self.num_bytes // 4), device=self.device)


def time_collective(
    trial: Trial,
    words: Mapping[str, str],
    channel: Channel,
    *,
    runs: int,
    peer: Callable[[], None] | None = None,
) -> dict[str, list[float]]:
    """Return seconds of each of ``words``, and of ``peer`` as "peer".

    ``words`` are names for algorithms (``"ring/4"``), their own mostly.
    """
    with Courier(channel) as courier:
        contenders = {
            name: _contender(trial, word, courier, channel) for name, word in words.items()
        }
        if peer is not None:
            contenders["peer"] = peer
        return interleave(
            {word: _to_the_end(trial, call) for word, call in contenders.items()},
            channel,
            runs=runs,
            repeat=trial.repeat,
        )


def back_end(trial: Trial, size: int) -> Callable[[], None]:
    """Return the default group's own collective, as anybody would call it."""
    each = max(1, trial.tensor().numel() // size)
    tensor = torch.zeros(each * size, device=trial.device)
    share = torch.zeros(each, device=trial.device)
    calls: dict[str, Callable[[], object]] = {
        "allreduce": lambda: dist.all_reduce(tensor),
        "reduce-scatter": lambda: _newest("reduce_scatter")(share, tensor),
        "all-gather": lambda: _newest("all_gather")(tensor, share),
        "broadcast": lambda: dist.broadcast(tensor, 0),
    }
    call = calls[trial.collective]
    return lambda: _drop(call())


def _newest(name: str) -> Callable[[Tensor, Tensor], object]:
    """Return a collective on whole tensors under the name that this PyTorch has for it."""
    older = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}
    call: Callable[[Tensor, Tensor], object] = getattr(
        dist, f"{name}_single", getattr(dist, older[name])
    )
    return call


def _contender(trial: Trial, word: str, courier: Courier, channel: Channel) -> Callable[[], None]:
    name, parts = parse_word(word, COLLECTIVES[trial.collective].keys())
    schedule = COLLECTIVES[trial.collective][name](channel.mesh, parts)
    tensor = trial.tensor()
    wire = parse_wire(trial.wire)
    if wire.share is not None:
        raise ConfigError(f"wire {trial.wire!r} is no collective: it is timed by a training step")
    if wire.dtype is None or wire.dtype == tensor.dtype:
        errand = courier.prepare(schedule, tensor, codec=wire.codec)
        return lambda: courier.run(errand)
    narrow = tensor.to(wire.dtype)
    errand = courier.prepare(schedule, narrow)

    def call() -> None:
        narrow.copy_(tensor)
        courier.run(errand)
        tensor.copy_(narrow)

    return call


def _to_the_end(trial: Trial, call: Callable[[], None]) -> Callable[[], None]:
    """Return a call that is over when it returns: a GPU is waited for."""
    if trial.device == "cpu":
        return call

    def through() -> None:
        call()
        torch.cuda.synchronize()

    return through


def _drop(_value: object) -> None:
    """Nothing: what a blocking call returns is None."""
