"""Synchronous data parallelism: every rank steps with the all-reduced gradients, as with DDP.

The training loop divides its loss by the global number of samples before backward. The sum over
ranks is therefore the mean over the global batch, divided once. In a user's own loop the loss is a
mean over the local batch: `SampleCountScaling` multiplies by the local count and divides by the
total.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.cluster.world import Mesh
from stretto.collectives.algorithm_table import parse_table
from stretto.collectives.codecs import parse_wire
from stretto.comm.broadcast import broadcast_
from stretto.comm.buckets import Bucket
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.reducer import (
    BucketReducer,
    GradientScaling,
    NoScaling,
    Reducer,
    SampleCountScaling,
    bucket_reducers_for,
)
from stretto.comm.transport import Transport
from stretto.config import Config
from stretto.errors import CheckpointError, ConfigError, StrettoError
from stretto.program.blocks import TensorInfo, cut_buckets, parameters_in_backward_order
from stretto.simulator.algorithm_choice import (
    NATIVE,
    choose_back_to_back_table,
    choose_bucket_bytes,
)
from stretto.simulator.cluster import Cluster, load_cluster
from stretto.strategies.contract import MakeOptimizer, StepGradients
from stretto.strategies.local_state import ModelBuffers
from stretto.telemetry.timeline import Recorder
from stretto.units import Bytes

AUTO = "auto"
DEFAULT_BUCKET_BYTES = 4_000_000


class AllReduceConfig(Config):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"allreduce"``."""

    kind: Literal["allreduce"] = "allreduce"
    algorithm: str = "auto"
    """The all-reduce algorithm by bucket size: "ring", or "doubling, hierarchical/8 from 1MB".
    "auto" picks the fastest for the cluster's description."""
    cluster: str | None = None
    """Cluster description written by stretto calibrate. "auto" uses it, and so does
    ``bucket_bytes`` when not set."""
    bucket_bytes: Bytes | None = None
    """Most bytes of gradients in a bucket; a larger gradient has a bucket of its own. When not set:
    the smallest size that reaches 98 % of the cluster's bandwidth; 4 MB without a cluster."""
    bucket_lengths: tuple[int, ...] | None = None
    """Tensors per bucket in the order of backward; derived from ``bucket_bytes`` when not set."""
    wire: str = "own"
    """The type that gradients are sent as: "own", "fp32", "bf16", "fp16", "fp8", or "topk 1%".
    "topk 1%" sends the largest entries and keeps the rest for the next step."""

    def load_cluster_description(self) -> Cluster | None:
        """Return the cluster's description if one is set and some setting depends on it."""
        needed = self.algorithm == AUTO or self.bucket_bytes is None
        return load_cluster(Path(self.cluster)) if self.cluster and needed else None

    @field_validator("algorithm")
    @classmethod
    def _check_algorithms(cls, text: str) -> str:
        return text if text == AUTO else _validated(parse_table, text)

    @field_validator("wire")
    @classmethod
    def _check_wire(cls, text: str) -> str:
        return _validated(parse_wire, text)

    @model_validator(mode="after")
    def _wire_fits_algorithm(self) -> Self:
        table = None if self.algorithm == AUTO else parse_table(self.algorithm)
        native = table is not None and any(choice.name == NATIVE for choice in table.choices)
        if native and parse_wire(self.wire).codec is not None:
            raise ValueError(
                f"wire {self.wire!r} decodes and sums at every hop, which the back end's own "
                f"all-reduce cannot do: take native out of strategy.algorithm = {self.algorithm!r}"
            )
        return self


def _validated(parse: Callable[[str], object], text: str) -> str:
    try:
        parse(text)
    except ConfigError as wrong:
        raise ValueError(str(wrong)) from None
    return text


def tune_config(config: AllReduceConfig, mesh: Mesh, model: nn.Module) -> AllReduceConfig:
    """Return ``config`` with the algorithm and bucket size chosen for ``mesh`` where left open.

    The choice depends on the cluster's description only. Without one, GPUs use the back end's
    all-reduce, because the back end knows their links.

    Raises:
        ConfigError: The description is missing or invalid.
    """
    cluster = config.load_cluster_description()
    has_codec = parse_wire(config.wire).codec is not None
    if config.algorithm == AUTO:
        on_gpu = any(parameter.is_cuda for parameter in model.parameters())
        lacks_description = cluster is None and on_gpu
        table = choose_back_to_back_table(
            cluster, Mesh((1,)) if lacks_description else mesh, native=not has_codec
        )
    else:
        table = parse_table(config.algorithm)
    bucket_bytes = _bucket_bytes(config)
    if config.bucket_bytes is None and cluster is not None and mesh.size > 1:
        bucket_bytes = choose_bucket_bytes(cluster.with_mesh(mesh), table)
    return config.model_copy(update={"algorithm": str(table), "bucket_bytes": bucket_bytes})


def _bucket_bytes(config: AllReduceConfig) -> int:
    """Return ``bucket_bytes`` or its default; zero is valid and gives one bucket per gradient."""
    return DEFAULT_BUCKET_BYTES if config.bucket_bytes is None else config.bucket_bytes


def resolve_bucket_lengths(config: AllReduceConfig, model: nn.Module) -> tuple[int, ...]:
    """Return the number of tensors in each bucket of ``model``, in the order of backward."""
    parameters = [p for _, p in parameters_in_backward_order(model)]
    if config.bucket_lengths is None:
        infos = [TensorInfo(p.numel() * p.element_size(), (p.dtype, p.device)) for p in parameters]
        # `check_strategy` calls this before `tune_config` has filled in bucket_bytes.
        return cut_buckets(infos, _bucket_bytes(config))
    lengths = config.bucket_lengths
    if sum(lengths) != len(parameters) or any(count < 1 for count in lengths):
        raise ConfigError(
            f"strategy.bucket_lengths adds up to {sum(lengths)} tensors, the model has "
            f"{len(parameters)} trainable ones: leave it out to have it derived"
        )
    return lengths


class AllReduce:
    """All-reduces gradients bucket by bucket while backward runs."""

    replicas_differ = False
    ranks_step_independently = False

    def __init__(
        self,
        config: AllReduceConfig,
        transport: Transport,
        recorder: Recorder | None = None,
        *,
        weigh_samples: bool = False,
    ) -> None:
        self.reads_gradients = False
        self.is_finite: Callable[[], bool] = lambda: True
        self._config = config
        self._transport = transport
        self._executor = CollectiveExecutor(transport)
        self._bucket_reducers: list[BucketReducer] = []
        self._recorder = recorder or Recorder(transport.rank)
        self._weigh_samples = weigh_samples
        self._buckets: list[Bucket] = []
        self._frozen: list[nn.Parameter] = []
        self._hooks: list[RemovableHandle] = []
        self._gradient_scaling: GradientScaling = NoScaling()
        self._reducer: Reducer | None = None
        self._optimizer: Optimizer | None = None
        self._step = 0
        self._ends_step = True
        self._updated_s = 0.0

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Broadcast rank 0's weights, cut buckets and hook backward."""
        _refuse_complex(model)
        self._config = tune_config(self._config, self._transport.mesh, model)
        broadcast_([*model.parameters(), *model.buffers()], self._transport)
        self._buffers = ModelBuffers(model)
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        if self._weigh_samples:
            self._gradient_scaling = SampleCountScaling(model)
        ordered = [p for _, p in parameters_in_backward_order(model)]
        wire = parse_wire(self._config.wire)
        for count in resolve_bucket_lengths(self._config, model):
            self._buckets.append(Bucket(ordered[:count], wire.dtype))
            del ordered[:count]
        table = parse_table(self._config.algorithm)
        self._bucket_reducers = bucket_reducers_for(
            self._buckets, table, wire, self._executor, self._transport
        )
        self._reducer = Reducer(
            self._buckets,
            self._bucket_reducers,
            self._transport,
            self._gradient_scaling,
            self._recorder,
        )
        for index, bucket in enumerate(self._buckets):
            self._hook(bucket, index, self._reducer)
        self._optimizer = make_optimizer(model.parameters())
        return model, self._optimizer

    def begin(self, step: int, micro: int, last_micro: bool, lr: float) -> None:
        """Record whether the next backward completes the step's gradients."""
        self._step = step
        self._ends_step = last_micro
        self._gradient_scaling.begin()
        if any(p.requires_grad for p in self._frozen):
            raise StrettoError(
                "a parameter that was frozen when the model was distributed is to be trained now: "
                "its gradients would not be reduced, and ranks would drift apart; unfreeze it "
                "before distributing the model and keep it out of the optimizer until then"
            )

    def after_backward(self, *, update: bool = True) -> StepGradients:
        """Wait for every bucket's sum; gradients are then equal on all ranks.

        Unless `reads_gradients` is set, each bucket's parameters are updated as soon as its sum
        is there, while other buckets are still in flight. Their gradients are then dropped, so
        that the loop's `Optimizer.step` does nothing.
        """
        assert self._reducer is not None
        if update and not self.reads_gradients:
            self._updated_s = 0.0
            self._reducer.finish(self._step, self._update)
            return StepGradients(updated_s=self._updated_s, is_applied=True)
        self._reducer.finish(self._step)
        grads = (p.grad for bucket in self._buckets for p in bucket.parameters)
        return StepGradients(tuple(grad for grad in grads if grad is not None))

    def after_update(self) -> None:
        """Do nothing: equal gradients keep equal parameters equal."""

    def consolidate(self) -> None:
        """Make buffers equal; parameters always are."""
        self._buffers.consolidate(self._transport)

    def consensus_distance(self) -> float | None:
        """Return None: all ranks have the same model."""
        return None

    def restore_local(self) -> None:
        """Do nothing: `consolidate` has not changed the parameters."""

    def close(self) -> None:
        """Remove the hooks from the model and end the executor's threads."""
        for hook in self._hooks:
            hook.remove()
        self._executor.close()

    def full_optimizer_state(self) -> Optimizer:
        """Return the optimizer: every rank has its whole state."""
        assert self._optimizer is not None
        return self._optimizer

    def load_full_optimizer_state(self, full_optimizer: Optimizer) -> None:
        """Do nothing: ``full_optimizer`` is the strategy's own optimizer."""

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """Return the summed gradients, last layers first."""
        parameters = (p for bucket in self._buckets for p in bucket.parameters)
        return [(self._names[id(p)], p.grad) for p in parameters if p.grad is not None]

    def rollback_state(self) -> dict[str, Tensor]:
        """Return all local state: a sparse wire changes it as gradients are sent."""
        return self.local_state()

    def local_state(self) -> dict[str, Tensor]:
        """Return each bucket reducer's residual: entries that a sparse wire has not sent yet."""
        return {
            f"bucket-{index}/{name}": tensor
            for index, bucket_reducer in enumerate(self._bucket_reducers)
            for name, tensor in bucket_reducer.state_dict().items()
        }

    def load_local_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the residuals; do nothing if either side has none, as after a change of wire.

        Raises:
            CheckpointError: The residuals belong to other buckets.
        """
        kept = self.local_state()
        if not kept or not state:
            return
        if kept.keys() != state.keys():
            raise CheckpointError(
                f"the checkpoint keeps unsent gradients of {len(state)} buckets, the run has "
                f"{len(kept)}: set strategy.bucket_lengths and strategy.bucket_bytes back to "
                "resume, or start a new run under another name (init.checkpoint takes the weights "
                "along)"
            )
        for index, bucket_reducer in enumerate(self._bucket_reducers):
            prefix = f"bucket-{index}/"
            bucket_reducer.load_state_dict(
                {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
            )

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a run resumes from model and optimizer."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Accept the empty state."""

    def _update(self, bucket: Bucket) -> None:
        """Update the parameters of ``bucket``, the only ones that have gradients now.

        The optimizer must update each parameter by itself; others need `reads_gradients`.
        """
        assert self._optimizer is not None
        started_s = time.monotonic()
        with self._recorder.span("update", "compute", step=self._step):
            self._optimizer.step()
            for parameter in bucket.parameters:
                parameter.grad = None
        self._updated_s += time.monotonic() - started_s

    def _hook(self, bucket: Bucket, index: int, reducer: Reducer) -> None:
        def on_gradient_ready(_parameter: Tensor) -> None:
            if self._ends_step:
                reducer.gradient_ready(index)

        for parameter in bucket.parameters:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(on_gradient_ready))


def _refuse_complex(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(
                f"parameter {name} is complex: sums of complex gradients are not supported; keep "
                "its real and imaginary parts in a real parameter (torch.view_as_real)"
            )
