"""Gradients of virtual workers: samples, forward and backward of every worker.

`WorkerGradients` does it for one worker. `LockStepWorkers` calls it for one worker after another,
then makes one update of all replicas. On a GPU, small models leave the device idle between
kernel launches. So `CapturedStep` records the forward and backward of all workers once, spread
over several streams. Every later step replays the record with new samples in the same buffers.
"""

import copy
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from stretto.data.loader import LoadedSamples
from stretto.data.order import RankSamples, rank_samples, steps_per_epoch
from stretto.errors import StrettoError
from stretto.models import per_sample_loss
from stretto.run import PreparedRun, RunConfig, derive_rates
from stretto.train.precision import forward_in_precision
from stretto.train.run_parts import count_epoch_steps, count_steps
from stretto.train.step import seed_randomness
from stretto.virtual.stacked_models import StackedModels

WorkerBatch = tuple[Tensor, Tensor]
"""Inputs and targets of one worker in one step."""


class WorkerGradients:
    """All workers with their modules and their shares of the data."""

    def __init__(
        self,
        config: RunConfig,
        prepared: PreparedRun,
        workers: int,
        num_replicas: int,
        device: torch.device,
    ) -> None:
        self.config, self.prepared, self.workers = config, prepared, workers
        self.device = device
        self.model = copy.deepcopy(prepared.model).to(device)
        """The initial model of every worker."""
        source = prepared.source
        self.total_steps = count_steps(config.train, source.num_samples)
        self.epoch_steps = count_epoch_steps(config.train, source.num_samples)
        self._pass_steps = steps_per_epoch(source.num_samples, config.train.batch)
        self.derived = derive_rates(config, source.num_samples)
        self.stack = StackedModels(self.model, workers, num_replicas)

    def samples_by_step(self) -> Iterator[RankSamples]:
        """Yield the sample indices of each step, concatenated worker after worker."""
        for step in range(self.total_steps):
            by_worker = [self._rank_samples(step, worker) for worker in range(self.workers)]
            samples = np.concatenate([worker_samples.samples for worker_samples in by_worker])
            yield RankSamples(samples, by_worker[0].epoch)

    def split_batch(self, step: int, batch: LoadedSamples) -> list[WorkerBatch]:
        """Split the loaded samples of ``step`` into one batch for each worker, on the device.

        Raises:
            StrettoError: Some samples of the step could not be read.
        """
        sizes = [len(self._rank_samples(step, worker).samples) for worker in range(self.workers)]
        if sum(sizes) != len(batch.inputs):
            raise StrettoError(
                f"step {step + 1}: {sum(sizes) - len(batch.inputs)} samples could not be read; "
                "virtual workers cannot tell which worker they belong to; repair the data (stretto "
                "train names the files)"
            )
        inputs, targets = (t.to(self.device) for t in (batch.inputs, batch.targets))
        return list(zip(inputs.split(sizes), targets.split(sizes), strict=True))

    def accumulate_gradients(
        self, step: int, worker: int, worker_batch: WorkerBatch, num_samples: int
    ) -> float:
        """Add one worker's gradients to those of its replica; return the sum of its losses.

        The loss is scaled by replicas / ``num_samples``, where ``num_samples`` counts the samples
        of all workers in the step. So the mean gradient over replicas is that of the global batch.
        """
        train = self.config.train
        inputs, targets = worker_batch
        sizes = train.micro_batch_sizes(len(inputs), self.workers)
        total = 0.0
        micro_batches = zip(inputs.split(sizes), targets.split(sizes), strict=True)
        for micro, (micro_inputs, micro_targets) in enumerate(micro_batches):
            if len(micro_inputs):
                loss = self._loss(step, micro, worker, micro_inputs, micro_targets)
                total += float(loss.detach())
                (loss * (self.stack.num_replicas / num_samples)).backward()
        return total

    def _loss(self, step: int, micro: int, worker: int, inputs: Tensor, targets: Tensor) -> Tensor:
        train = self.config.train
        seed_randomness(self.config.run.seed, step, micro, worker)
        outputs = forward_in_precision(train.precision, self.stack.modules[worker], inputs)
        return per_sample_loss(outputs, targets, train.label_smoothing).sum()

    def _rank_samples(self, step: int, worker: int) -> RankSamples:
        epoch, step_in_epoch = divmod(step, self._pass_steps)
        return rank_samples(
            step_in_epoch,
            batch=self.config.train.batch,
            rank=worker,
            size=self.workers,
            num_samples=self.prepared.source.num_samples,
            seed=self.config.run.seed,
            epoch=epoch,
        )


LANES = 8
"""Largest number of CUDA streams that workers are spread over."""
_WARM_UPS = 3
"""Runs before the capture: libraries select their kernels in the first runs."""

Lane = Callable[[], None]
"""Work in a fixed order; several lanes may run concurrently."""
Replay = Callable[[], None]
"""Runs recorded work once more."""
Recorder = Callable[[Sequence[Lane]], Replay]
"""Records the work of several lanes and returns its replay."""


def run_sequentially(lanes: Sequence[Lane]) -> Replay:
    """Return a replay that runs one lane after another."""

    def replay() -> None:
        for lane in lanes:
            lane()

    return replay


def capture_cuda_graph(lanes: Sequence[Lane]) -> Replay:
    """Capture a CUDA graph with each lane on its own stream."""
    streams = [torch.cuda.Stream() for _ in lanes]

    def run_concurrently() -> None:
        current = torch.cuda.current_stream()
        for lane, stream in zip(lanes, streams, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                lane()
        for stream in streams:
            current.wait_stream(stream)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            run_concurrently()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_concurrently()
    return graph.replay


RECORDERS: dict[str, Recorder] = {"cuda": capture_cuda_graph}
"""How to record a step, by device type; on other devices workers run one by one."""


class CapturedStep:
    """The recorded forward and backward of all workers, for steps of one batch size."""

    def __init__(
        self,
        worker_gradients: WorkerGradients,
        worker_batches: Sequence[WorkerBatch],
        recorder: Recorder,
    ) -> None:
        """Record a step; ``worker_batches`` gives the shapes of the workers' batches."""
        self._worker_gradients, self._stack = worker_gradients, worker_gradients.stack
        self._inputs = [inputs.clone() for inputs, _ in worker_batches]
        self._targets = [targets.clone() for _, targets in worker_batches]
        self._num_samples = sum(len(inputs) for inputs in self._inputs)
        device = self._inputs[0].device
        self._losses = torch.zeros(len(worker_batches), dtype=torch.float64, device=device)
        buffers = [buffer for module in self._stack.modules for buffer in module.buffers()]
        saved = [buffer.clone() for buffer in buffers]
        self._replay = recorder(self._lanes())
        # Recording runs the forward pass, which updates batch statistics. Undo that.
        for buffer, value in zip(buffers, saved, strict=True):
            buffer.copy_(value)

    def fits(self, worker_batches: Sequence[WorkerBatch]) -> bool:
        """Return whether every worker has as many samples as in the recorded step."""
        return [len(inputs) for inputs, _ in worker_batches] == [
            len(inputs) for inputs in self._inputs
        ]

    def accumulate_gradients(self, worker_batches: Sequence[WorkerBatch]) -> float:
        """Replace all replicas' gradients by those of the batches; return the sum of losses."""
        torch._foreach_copy_(self._inputs, [inputs for inputs, _ in worker_batches])
        torch._foreach_copy_(self._targets, [targets for _, targets in worker_batches])
        self._stack.rows.clear_gradients()
        self._replay()
        return float(self._losses.sum())

    def _lanes(self) -> list[Lane]:
        """Return the work of all workers; workers of one replica share a lane to avoid races."""
        workers: list[list[int]] = [[] for _ in range(min(LANES, self._stack.num_replicas))]
        for worker, replica in enumerate(self._stack.replica_of):
            workers[replica % len(workers)].append(worker)
        return [self._lane(lane_workers) for lane_workers in workers]

    def _lane(self, workers: Sequence[int]) -> Lane:
        def run_lane() -> None:
            for worker in workers:
                self._run_worker(worker)

        return run_lane

    def _run_worker(self, worker: int) -> None:
        train, module = self._worker_gradients.config.train, self._stack.modules[worker]
        inputs, targets = self._inputs[worker], self._targets[worker]
        sizes = train.micro_batch_sizes(len(inputs), self._worker_gradients.workers)
        total = torch.zeros_like(self._losses[worker])
        for micro_inputs, micro_targets in zip(
            inputs.split(sizes), targets.split(sizes), strict=True
        ):
            outputs = forward_in_precision(train.precision, module, micro_inputs)
            loss = per_sample_loss(outputs, micro_targets, train.label_smoothing).sum()
            total += loss.detach()
            self._add_gradients(module, loss * (self._stack.num_replicas / self._num_samples))
        self._losses[worker].copy_(total)

    def _add_gradients(self, module: torch.nn.Module, loss: Tensor) -> None:
        # Not loss.backward(): its AccumulateGrad nodes run on the stream of their creation, which
        # the capture does not include.
        trained = [p for p in module.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        pairs = [(p.grad, g) for p, g in zip(trained, found, strict=True) if g is not None]
        grads, new_grads = zip(*pairs, strict=True)
        torch._foreach_add_(list(grads), list(new_grads))
