"""Synchronous all-reduce: every step, every rank applies the sum of all gradients.

The training loop divides its loss by the global number of samples before backward, so that the sum
over ranks *is* the mean over the global batch, divided once. In a user's own loop, whose loss is a
mean over its local batch, `SampleWeights` multiplies by the local count and divides by the total.
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
from stretto.comm.algorithms.table import parse_table
from stretto.comm.buckets import Bucket, Piece, cut_buckets, order_of_backward
from stretto.comm.carriers import Carrier, carriers_for
from stretto.comm.channel import Channel
from stretto.comm.codecs import parse_wire
from stretto.comm.courier import Courier
from stretto.comm.reducer import Reducer, Summed, Weights
from stretto.comm.spread import spread_from_rank_0_
from stretto.config import Config
from stretto.errors import CheckpointError, ConfigError, StrettoError
from stretto.sim.choosing import NATIVE, choose_stream
from stretto.sim.cluster import Cluster, load_cluster
from stretto.sim.fusion import fusion_threshold
from stretto.strategy.base import Agreed, MakeOptimizer
from stretto.strategy.buffers import Buffers
from stretto.strategy.sample_weights import SampleWeights
from stretto.telemetry.timeline import Recorder
from stretto.units import Bytes

AUTO = "auto"
DEFAULT_FUSION = 4_000_000


class AllReduceConfig(Config):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"allreduce"``."""

    kind: Literal["allreduce"] = "allreduce"
    algorithm: str = "auto"
    """The all-reduce that carries a bucket, by size: "ring", or "doubling, hierarchical/8 from
    1MB"; "auto" is what the cluster's description says is fastest."""
    cluster: str | None = None
    """Description written by stretto calibrate; for "auto", and for fusion when not set."""
    fusion: Bytes | None = None
    """Gradients are fused into buckets of at most this size; a larger one travels alone. When not
    set, the smallest that reaches 98 % of the cluster's rate; 4 MB without a cluster."""
    cuts: tuple[int, ...] | None = None
    """Tensors per bucket in the order of backward; derived from ``fusion`` when not set."""
    wire: str = "own"
    """What gradients travel as: "own", "fp32", "bf16", "fp16", "fp8", or "topk 1%" for their
    largest entries, the rest being kept for the next step."""

    def description(self) -> Cluster | None:
        """Return the cluster's description, where there is one and something is left open."""
        needed = self.algorithm == AUTO or self.fusion is None
        return load_cluster(Path(self.cluster)) if self.cluster and needed else None

    @field_validator("algorithm")
    @classmethod
    def _known_algorithms(cls, text: str) -> str:
        return text if text == AUTO else _checked(parse_table, text)

    @field_validator("wire")
    @classmethod
    def _known_wire(cls, text: str) -> str:
        return _checked(parse_wire, text)

    @model_validator(mode="after")
    def _wire_fits_algorithm(self) -> Self:
        table = None if self.algorithm == AUTO else parse_table(self.algorithm)
        native = table is not None and any(choice.name == NATIVE for choice in table.choices)
        if native and parse_wire(self.wire).codec is not None:
            raise ValueError(
                f"wire {self.wire!r} is summed hop by hop, which the back end's own all-reduce "
                f"cannot do: take native out of strategy.algorithm = {self.algorithm!r}"
            )
        return self


def _checked(parse: Callable[[str], object], text: str) -> str:
    try:
        parse(text)
    except ConfigError as wrong:
        raise ValueError(str(wrong)) from None
    return text


def tuned(config: AllReduceConfig, mesh: Mesh, model: nn.Module) -> AllReduceConfig:
    """Return ``config`` with what it leaves open chosen for ``mesh``, from a description alone.

    Without one, GPUs are left to the back end, which knows what joins them.

    Raises:
        ConfigError: The description is missing or wrong.
    """
    cluster = config.description()
    coded = parse_wire(config.wire).codec is not None
    if config.algorithm == AUTO:
        on_gpu = any(parameter.is_cuda for parameter in model.parameters())
        unknown = cluster is None and on_gpu
        table = choose_stream(cluster, Mesh((1,)) if unknown else mesh, native=not coded)
    else:
        table = parse_table(config.algorithm)
    fusion = _fusion(config)
    if config.fusion is None and cluster is not None and mesh.size > 1:
        fusion = fusion_threshold(cluster.with_mesh(mesh), table)
    return config.model_copy(update={"algorithm": str(table), "fusion": fusion})


def _fusion(config: AllReduceConfig) -> int:
    """Return the threshold that is set; zero is one, too: every gradient travels alone."""
    return DEFAULT_FUSION if config.fusion is None else config.fusion


def bucket_cuts(config: AllReduceConfig, model: nn.Module) -> tuple[int, ...]:
    """Return the tensors per bucket that a run of ``model`` uses: part of its resolved config."""
    parameters = [p for _, p in order_of_backward(model)]
    if config.cuts is None:
        pieces = [Piece(p.numel() * p.element_size(), (p.dtype, p.device)) for p in parameters]
        return cut_buckets(pieces, _fusion(config))  # checked before it is tuned
    if sum(config.cuts) != len(parameters) or any(count < 1 for count in config.cuts):
        raise ConfigError(
            f"strategy.cuts adds up to {sum(config.cuts)} tensors, the model has {len(parameters)} "
            "trainable ones: leave it out to have it derived"
        )
    return config.cuts


class AllReduce:
    """Gradients reduced bucket by bucket while backward goes on."""

    own_models = False
    alone = False

    def __init__(
        self,
        config: AllReduceConfig,
        channel: Channel,
        recorder: Recorder | None = None,
        *,
        weigh_samples: bool = False,
    ) -> None:
        self.reads_gradients = False
        self.sound: Callable[[], bool] = lambda: True
        self._config = config
        self._channel = channel
        self._courier = Courier(channel)
        self._carriers: list[Carrier] = []
        self._recorder = recorder or Recorder(channel.rank)
        self._weigh_samples = weigh_samples
        self._buckets: list[Bucket] = []
        self._frozen: list[nn.Parameter] = []
        self._hooks: list[RemovableHandle] = []
        self._weights: Weights = Summed()
        self._reducer: Reducer | None = None
        self._optimizer: Optimizer | None = None
        self._step = 0
        self._counts = True
        self._updated_s = 0.0

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Give every rank the weights of rank 0, lay out buckets, hook backward."""
        _refuse_complex(model)
        self._config = tuned(self._config, self._channel.mesh, model)
        spread_from_rank_0_([*model.parameters(), *model.buffers()], self._channel)
        self._buffers = Buffers(model)
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        if self._weigh_samples:
            self._weights = SampleWeights(model)
        ordered = [p for _, p in order_of_backward(model)]
        wire = parse_wire(self._config.wire)
        for count in bucket_cuts(self._config, model):
            self._buckets.append(Bucket(ordered[:count], wire.dtype))
            del ordered[:count]
        table = parse_table(self._config.algorithm)
        self._carriers = carriers_for(self._buckets, table, wire, self._courier, self._channel)
        self._reducer = Reducer(
            self._buckets, self._carriers, self._channel, self._weights, self._recorder
        )
        for index, bucket in enumerate(self._buckets):
            self._hook(bucket, index, self._reducer)
        self._optimizer = make_optimizer(model.parameters())
        return model, self._optimizer

    def begin(self, step: int, micro: int, last_micro: bool, lr: float) -> None:
        """Note whether the coming backward completes the step's gradients."""
        self._step = step
        self._counts = last_micro
        self._weights.begin()
        if any(p.requires_grad for p in self._frozen):
            raise StrettoError(
                "a parameter that was frozen when the model was distributed is to be trained now: "
                "ranks would drift apart; unfreeze it before that and keep it out of the optimizer "
                "until it is wanted"
            )

    def after_backward(self, *, update: bool = True) -> Agreed:
        """Wait for every bucket's sum; gradients are then equal on all ranks.

        Where nobody reads them, each bucket's parameters are updated at once, beside the buckets
        that still travel, and their gradients dropped: `Optimizer.step` then finds nothing to do.
        """
        assert self._reducer is not None
        if update and not self.reads_gradients:
            self._updated_s = 0.0
            self._reducer.finish(self._step, self._update)
            return Agreed(updated_s=self._updated_s, done=True)
        self._reducer.finish(self._step)
        grads = (p.grad for bucket in self._buckets for p in bucket.parameters)
        return Agreed(tuple(grad for grad in grads if grad is not None))

    def after_update(self) -> None:
        """Do nothing: equal gradients keep equal parameters equal."""

    def settle(self) -> None:
        """Make buffers equal; parameters are."""
        self._buffers.settle(self._channel)

    def apart(self) -> float | None:
        """Return nothing: there is one model."""
        return None

    def unsettle(self) -> None:
        """Do nothing: parameters are equal all the time."""

    def close(self) -> None:
        """Take the hooks off the model and end the courier's threads."""
        for hook in self._hooks:
            hook.remove()
        self._courier.close()

    def whole_optimizer(self) -> Optimizer:
        """Return the optimizer: every rank has all of it."""
        assert self._optimizer is not None
        return self._optimizer

    def take_optimizer(self, whole: Optimizer) -> None:
        """Do nothing: it is the optimizer."""

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """Return the summed gradients, last layers first."""
        parameters = (p for bucket in self._buckets for p in bucket.parameters)
        return [(self._names[id(p)], p.grad) for p in parameters if p.grad is not None]

    def undoable(self) -> dict[str, Tensor]:
        """Return all of it: entries are taken out as gradients leave."""
        return self.own_state()

    def own_state(self) -> dict[str, Tensor]:
        """Return what each bucket's carrier keeps: entries that a sparse wire has not sent yet."""
        return {
            f"bucket-{index}/{name}": tensor
            for index, carrier in enumerate(self._carriers)
            for name, tensor in carrier.state_dict().items()
        }

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Hand it back to the carriers; one from another kind of wire leaves nothing to hand on.

        Raises:
            CheckpointError: It was kept for other buckets.
        """
        kept = self.own_state()
        if not kept or not state:
            return
        if kept.keys() != state.keys():
            raise CheckpointError(
                f"the checkpoint keeps unsent gradients of {len(state)} buckets, the run has "
                f"{len(kept)}: set strategy.cuts and strategy.fusion back to resume, or start a "
                "new run under another name (init.checkpoint takes the weights along)"
            )
        for index, carrier in enumerate(self._carriers):
            before = f"bucket-{index}/"
            carrier.load_state_dict(
                {n.removeprefix(before): t for n, t in state.items() if n.startswith(before)}
            )

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: model and optimizer are all there is."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Accept the empty state."""

    def _update(self, bucket: Bucket) -> None:
        """Step with the only gradients there are: those of ``bucket``, as all others are taken.

        Every optimizer whose update of a parameter looks at that parameter alone may be stepped
        in parts; others need `reads_gradients`.
        """
        assert self._optimizer is not None
        began_s = time.monotonic()
        with self._recorder.span("update", "compute", step=self._step):
            self._optimizer.step()
            for parameter in bucket.parameters:
                parameter.grad = None
        self._updated_s += time.monotonic() - began_s

    def _hook(self, bucket: Bucket, index: int, reducer: Reducer) -> None:
        def gradient_is_there(_parameter: Tensor) -> None:
            if self._counts:
                reducer.gradient_ready(index)

        for parameter in bucket.parameters:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(gradient_is_there))


def _refuse_complex(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(
                f"parameter {name} is complex: sums of complex gradients are not supported; keep "
                "its real and imaginary parts in a real parameter (torch.view_as_real)"
            )
