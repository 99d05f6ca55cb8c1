"""Virtual workers that step whenever they are ready: AD-PSGD, in an order that is drawn.

`stretto.strategy.adpsgd` does the same for one rank. A real run has the order in which messages
arrive; here it is `random_events`, a function of the strategy's seed. All meet where real ranks
do; meanwhile nobody is further ahead of the slowest than real ranks may be.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from stretto.data.loader import LoadedShare
from stretto.optim import stacked_optimizer
from stretto.optim.combining import average_pair_
from stretto.topology import Act, random_events
from stretto.train.loose import LAG
from stretto.virtual.learners import Learners, Part


class InAnyOrder:
    """An optimizer for every worker: each updates its own row, when its turn comes."""

    own_models = True

    def __init__(self, learners: Learners, seed: int, all_meet: Callable[[int], bool]) -> None:
        """Make it; ``all_meet`` says after which steps."""
        self._learners, self._seed, self._all_meet = learners, seed, all_meet
        config, model = learners.config, learners.model
        self._rows = [learners.stack.rows.of(worker) for worker in range(learners.workers)]
        self._optimizers = [
            stacked_optimizer(config.optim, model, rows.values, peak_lr=learners.derived.lr)
            for rows in self._rows
        ]

    def steps(self, batches: Iterable[LoadedShare]) -> Iterator[float]:
        """Take all steps; yield the mean loss of each in turn, when all have begun it.

        Of a step after which all meet, when all have taken it and every average is made.
        """
        window = _Window(self._learners, batches)
        first = 0
        for step in range(self._learners.total_steps):
            if self._all_meet(step):
                yield from self._until_all_meet(first, step + 1, window)
                first = step + 1

    def means(self) -> dict[str, Tensor]:
        """Return the mean of all models, by name."""
        return self._learners.stack.means()

    def _until_all_meet(self, first: int, end: int, window: "_Window") -> Iterator[float]:
        workers = self._learners.workers
        for event in random_events(workers, end - first, self._seed, first=first, ahead=LAG):
            if event.act is Act.READ:
                self._read(event.step, event.worker, window)
                if event.step + 1 < end and window.is_over(event.step):
                    yield window.loss(event.step)
            elif event.act is Act.APPLY:
                self._apply(event.step, event.worker)
            else:
                self._average(event.worker, event.peer)
        yield window.loss(end - 1)

    def _read(self, step: int, worker: int, window: "_Window") -> None:
        """Take the gradient of the model as it is now; nothing else of it is needed later."""
        part, num_samples = window.take(step, worker)
        self._rows[worker].clear_gradients()
        window.add(step, self._learners.learn(step, worker, part, num_samples))

    @torch.no_grad()
    def _apply(self, step: int, worker: int) -> None:
        optimizer = self._optimizers[worker]
        for group in optimizer.param_groups:
            group["lr"] = self._learners.derived.rate_at(step)
        if (limit := self._learners.config.train.clip_norm) is not None:
            self._rows[worker].clip_gradients_(limit)
        optimizer.step()

    @torch.no_grad()
    def _average(self, worker: int, peer: int) -> None:
        for value in self._learners.stack.values.values():
            average_pair_(value.data[worker], value.data[peer])


class _Window:
    """The samples of the steps that some worker has not begun, and what their losses come to."""

    def __init__(self, learners: Learners, batches: Iterable[LoadedShare]) -> None:
        self._learners, self._batches = learners, enumerate(batches)
        self._parts: dict[int, list[Part | None]] = {}
        self._sizes: dict[int, int] = {}
        self._losses: dict[int, float] = {}

    def take(self, step: int, worker: int) -> tuple[Part, int]:
        """Return a worker's samples of a step, once, and how many all workers have in it."""
        while step not in self._parts:
            number, batch = next(self._batches)
            self._parts[number] = list(self._learners.dealt(number, batch))
            self._sizes[number] = len(batch.inputs)
            self._losses[number] = 0.0
        part, self._parts[step][worker] = self._parts[step][worker], None
        assert part is not None, "a worker begins a step once"
        return part, self._sizes[step]

    def add(self, step: int, losses: float) -> None:
        """Add a worker's losses."""
        self._losses[step] += losses

    def is_over(self, step: int) -> bool:
        """Say whether every worker has begun a step."""
        return all(part is None for part in self._parts[step])

    def loss(self, step: int) -> float:
        """Return the mean loss of a step that all have begun, and forget it."""
        del self._parts[step]
        return self._losses.pop(step) / self._sizes.pop(step)
