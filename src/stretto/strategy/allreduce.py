"""Synchronous all-reduce: every step, every rank applies the sum of all gradients.

The training loop divides its loss by the global number of samples before backward, so that the sum
over ranks *is* the mean over the global batch, divided once. In a user's own loop, whose loss is a
mean over its local batch, `SampleWeights` multiplies by the local count and divides by the total.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import field_validator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.comm.algorithms.table import parse_table
from stretto.comm.buckets import WIRE, Bucket, Piece, cut_buckets, order_of_backward
from stretto.comm.channel import Channel
from stretto.comm.reducer import Reducer, Summed, Weights
from stretto.comm.spread import average_, spread_from_rank_0_
from stretto.config import Config
from stretto.errors import ConfigError, StrettoError
from stretto.strategy.base import Agreed, MakeOptimizer
from stretto.strategy.sample_weights import SampleWeights
from stretto.telemetry.timeline import Recorder
from stretto.units import Bytes


class AllReduceConfig(Config):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"allreduce"``."""

    kind: Literal["allreduce"] = "allreduce"
    algorithm: str = "native"
    """The all-reduce that carries a bucket, by size: "ring", or "native, ring from 8MB"."""
    fusion: Bytes = 4_000_000
    """Gradients are fused into buckets of at most this size; a larger one travels alone."""
    cuts: tuple[int, ...] | None = None
    """Tensors per bucket in the order of backward; derived from ``fusion`` when not set."""
    wire: Literal["own", "fp32", "bf16", "fp16"] = "own"
    """Type gradients travel in and are summed in; "own" is the gradient's own."""

    @field_validator("algorithm")
    @classmethod
    def _known_algorithms(cls, text: str) -> str:
        try:
            parse_table(text)
        except ConfigError as wrong:
            raise ValueError(str(wrong)) from None
        return text


def bucket_cuts(config: AllReduceConfig, model: nn.Module) -> tuple[int, ...]:
    """Return the tensors per bucket that a run of ``model`` uses: part of its resolved config."""
    parameters = [p for _, p in order_of_backward(model)]
    if config.cuts is None:
        pieces = [Piece(p.numel() * p.element_size(), (p.dtype, p.device)) for p in parameters]
        return cut_buckets(pieces, config.fusion)
    if sum(config.cuts) != len(parameters) or any(count < 1 for count in config.cuts):
        raise ConfigError(
            f"strategy.cuts adds up to {sum(config.cuts)} tensors, the model has {len(parameters)} "
            "trainable ones: leave it out to have it derived"
        )
    return config.cuts


class AllReduce:
    """Gradients reduced bucket by bucket while backward goes on."""

    def __init__(
        self,
        config: AllReduceConfig,
        channel: Channel,
        recorder: Recorder | None = None,
        *,
        weigh_samples: bool = False,
    ) -> None:
        self.reads_gradients = False
        self._config = config
        self._channel = channel
        self._recorder = recorder or Recorder(channel.rank)
        self._weigh_samples = weigh_samples
        self._buckets: list[Bucket] = []
        self._statistics: list[Tensor] = []
        self._counters: list[Tensor] = []
        self._frozen: list[nn.Parameter] = []
        self._hooks: list[RemovableHandle] = []
        self._weights: Weights = Summed()
        self._reducer: Reducer | None = None
        self._optimizer: Optimizer | None = None
        self._step = 0
        self._counts = True

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Give every rank the weights of rank 0, lay out buckets, hook backward."""
        _refuse_complex(model)
        spread_from_rank_0_([*model.parameters(), *model.buffers()], self._channel)
        self._statistics = [b for b in model.buffers() if b.is_floating_point()]
        self._counters = [b for b in model.buffers() if not b.is_floating_point()]
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        if self._weigh_samples:
            self._weights = SampleWeights(model)
        ordered = [p for _, p in order_of_backward(model)]
        for count in bucket_cuts(self._config, model):
            self._buckets.append(Bucket(ordered[:count], WIRE[self._config.wire]))
            del ordered[:count]
        table = parse_table(self._config.algorithm)
        self._reducer = Reducer(
            self._buckets,
            [table.pick(bucket.num_bytes, self._channel.size) for bucket in self._buckets],
            self._channel,
            self._weights,
            self._recorder,
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

    def after_backward(self) -> Agreed:
        """Wait for every bucket's sum; gradients are then equal on all ranks.

        Where nobody reads them, each bucket's parameters are updated at once, beside the buckets
        that still travel, and their gradients dropped: `Optimizer.step` then finds nothing to do.
        """
        assert self._reducer is not None
        if not self.reads_gradients:
            self._reducer.finish(self._step, self._update)
            return Agreed()
        self._reducer.finish(self._step)
        grads = (p.grad for bucket in self._buckets for p in bucket.parameters)
        return Agreed(tuple(grad for grad in grads if grad is not None))

    def after_update(self) -> None:
        """Do nothing: equal gradients keep equal parameters equal."""

    def settle(self) -> None:
        """Make buffers equal: the mean of batch statistics, which were each rank's own until here.

        What cannot be averaged (counts of batches) is rank 0's.
        """
        average_(self._statistics, self._channel)
        spread_from_rank_0_(self._counters, self._channel)

    def close(self) -> None:
        """Take the hooks off the model and end the communication thread."""
        for hook in self._hooks:
            hook.remove()
        if self._reducer is not None:
            self._reducer.close()

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
        with self._recorder.span("update", "compute", step=self._step):
            self._optimizer.step()
            for parameter in bucket.parameters:
                parameter.grad = None

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
