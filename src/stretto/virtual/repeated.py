"""Forward and backward of all workers as one piece of work, repeated with other samples.

A GPU is done with a small model's operation before the host has asked for the next one. So what
all workers do in a step is recorded once, spread over several streams, and played again in every
step: its operations are the same, only the samples differ, and they lie where they always do.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.model import per_sample_loss
from stretto.train.step import forward_in
from stretto.virtual.learners import Learners, Part

LANES = 8
"""Streams over which workers are spread."""
_WARM_UPS = 3
"""Runs before one is recorded: libraries choose how to compute in the first ones."""

Lane = Callable[[], None]
"""Work that is done in its order; lanes may be worked on beside each other."""
Again = Callable[[], None]
Record = Callable[[Sequence[Lane]], Again]
"""From the lanes of some work to what does it again."""


def one_by_one(lanes: Sequence[Lane]) -> Again:
    """Do lane after lane, each time."""

    def again() -> None:
        for lane in lanes:
            lane()

    return again


def captured(lanes: Sequence[Lane]) -> Again:
    """Record a CUDA graph, every lane on a stream of its own."""
    streams = [torch.cuda.Stream() for _ in lanes]

    def beside_each_other() -> None:
        here = torch.cuda.current_stream()
        for lane, stream in zip(lanes, streams, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                lane()
        for stream in streams:
            here.wait_stream(stream)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            beside_each_other()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        beside_each_other()
    return graph.replay


RECORDS: dict[str, Record] = {"cuda": captured}
"""How a step is recorded, by the type of device; elsewhere workers learn one by one."""


class Repeated:
    """The gradients of all workers at once, for steps of one size."""

    def __init__(self, learners: Learners, parts: Sequence[Part], record: Record) -> None:
        """Record it, with ``parts`` as an example of what workers have in a step."""
        self._learners, self._stack = learners, learners.stack
        self._inputs = [inputs.clone() for inputs, _ in parts]
        self._targets = [targets.clone() for _, targets in parts]
        self._num_samples = sum(len(inputs) for inputs in self._inputs)
        device = self._inputs[0].device
        self._losses = torch.zeros(len(parts), dtype=torch.float64, device=device)
        buffers = [buffer for module in self._stack.modules for buffer in module.buffers()]
        before = [buffer.clone() for buffer in buffers]
        self._again = record(self._lanes())
        # Nobody has learned anything by being recorded.
        for buffer, earlier in zip(buffers, before, strict=True):
            buffer.copy_(earlier)

    def fits(self, parts: Sequence[Part]) -> bool:
        """Say whether workers have as many samples as when it was recorded."""
        return [len(inputs) for inputs, _ in parts] == [len(inputs) for inputs in self._inputs]

    def learn(self, parts: Sequence[Part]) -> float:
        """Give every model the gradients of its workers' samples; return what losses add up to."""
        torch._foreach_copy_(self._inputs, [inputs for inputs, _ in parts])
        torch._foreach_copy_(self._targets, [targets for _, targets in parts])
        self._stack.rows.clear_gradients()
        self._again()
        return float(self._losses.sum())

    def _lanes(self) -> list[Lane]:
        """Return the work of all; those who share a model are in one lane, which adds them up."""
        workers: list[list[int]] = [[] for _ in range(min(LANES, self._stack.parties))]
        for worker, party in enumerate(self._stack.party_of):
            workers[party % len(workers)].append(worker)
        return [self._lane(mine) for mine in workers]

    def _lane(self, workers: Sequence[int]) -> Lane:
        def work() -> None:
            for worker in workers:
                self._work(worker)

        return work

    def _work(self, worker: int) -> None:
        train, module = self._learners.config.train, self._stack.modules[worker]
        inputs, targets = self._inputs[worker], self._targets[worker]
        sizes = train.piece_sizes(len(inputs), self._learners.workers)
        total = torch.zeros_like(self._losses[worker])
        for some, wanted in zip(inputs.split(sizes), targets.split(sizes), strict=True):
            outputs = forward_in(train.precision, module, some)
            loss = per_sample_loss(outputs, wanted, train.label_smoothing).sum()
            total += loss.detach()
            self._add_gradients(module, loss * (self._stack.parties / self._num_samples))
        self._losses[worker].copy_(total)

    def _add_gradients(self, module: torch.nn.Module, loss: Tensor) -> None:
        # Asked for, not accumulated: what accumulates has a stream of its own.
        trained = [p for p in module.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        pairs = [(p.grad, g) for p, g in zip(trained, found, strict=True) if g is not None]
        grads, more = zip(*pairs, strict=True)
        torch._foreach_add_(list(grads), list(more))
