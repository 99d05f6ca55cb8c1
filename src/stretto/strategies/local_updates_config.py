"""Settings of local updates: the length of a round and its outer optimizer."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from stretto.cluster.world import Mesh
from stretto.collectives.algorithm_table import AlgorithmTable, parse_table
from stretto.collectives.codecs import check_wire_dtype
from stretto.config import Config
from stretto.errors import ConfigError
from stretto.optim.rules import (
    Tensors,
    outer_average_,
    outer_nesterov_,
    outer_noloco_,
    outer_slowmo_,
)
from stretto.simulator.algorithm_choice import default_table
from stretto.topology import Topology, matching

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class OuterOptimizer:
    """The outer optimizer of a round: a rule of `stretto.optim.rules` with its settings."""

    rule: Callable[[Tensors, Tensors, Tensors, float], None]
    """Updates round starts in place: (starts, momenta, outer gradients, learning rate)."""
    has_momentum: bool = True
    """Whether the rule uses momenta."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """Streaming of a round: number of fragments, delay in steps, and mixing factor."""

    fragments: int = 1
    delay: int = 0
    mix: float = 1.0


class LocalConfig(Config):
    """Settings of all kinds of local updates."""

    every: int = Field(default=8, ge=1)
    """Steps between two rounds, in which ranks synchronise."""
    reset_momentum: bool = False
    """Whether a round zeroes the momentum of SGD or LARS; the state of Adam stays."""

    @abstractmethod
    def outer(self) -> OuterOptimizer:
        """Return the outer optimizer, which computes where ranks continue after a round."""

    def streaming(self) -> Streaming:
        """Return how a round is streamed; by default whole and without delay."""
        return Streaming()

    def fragment_turn(self, step: int) -> int | None:
        """Return which fragments are sent after ``step``: those of this turn; None for none.

        It depends on the step only, so that ranks agree after skipped steps and resumed runs.
        """
        fragments = self.streaming().fragments
        number, within = divmod(step + 1, self.every // fragments)
        return None if within else (number - 1) % fragments


class AveragedConfig(LocalConfig):
    """Settings of kinds whose rounds average all ranks."""

    algorithm: str = AUTO
    """The all-reduce algorithm by size: "ring", or "doubling, hierarchical/8 from 1MB"; "auto"
    picks the cheapest for typical links."""
    wire: str = "own"
    """The type that differences are sent as: "own", "fp32", "bf16", "fp16". "own" is the
    parameters' type, but 32 bits for parameters of 16 bits."""

    def outer(self) -> OuterOptimizer:
        """Return plain averaging: ranks continue from their mean."""
        return OuterOptimizer(
            lambda starts, _, outer_gradient, _lr: outer_average_(starts, outer_gradient),
            has_momentum=False,
        )

    def table(self, mesh: Mesh, *, on_gpu: bool) -> AlgorithmTable:
        """Return the all-reduce algorithm for each message size."""
        if self.algorithm != AUTO:
            return parse_table(self.algorithm)
        return default_table(mesh, on_gpu=on_gpu)

    @field_validator("algorithm")
    @classmethod
    def _check_algorithms(cls, text: str) -> str:
        try:
            return text if text == AUTO else str(parse_table(text))
        except ConfigError as wrong:
            raise ValueError(str(wrong)) from None

    _check_wire = field_validator("wire")(check_wire_dtype)


class LocalSGDConfig(AveragedConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"local_sgd"``.

    Ranks step alone, then their parameters are averaged (Stich, 2018, arXiv:1805.09767).
    """

    kind: Literal["local_sgd"] = "local_sgd"


class PostLocalConfig(AveragedConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"post_local"``.

    Parameters are averaged after every step at first, later as in local_sgd (Lin et al., 2018,
    arXiv:1808.07217, who switch where the learning rate first falls). For SGD, with or without
    momentum, the first phase is synchronous training.
    """

    kind: Literal["post_local"] = "post_local"
    from_step: int = Field(default=0, ge=0)
    """Number of steps in the first phase, which averages after every step; 0 is local_sgd."""

    def fragment_turn(self, step: int) -> int | None:
        """Return 0 for every step before ``from_step``, then as in local_sgd."""
        return 0 if step < self.from_step else super().fragment_turn(step)


class SlowMoConfig(AveragedConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"slowmo"``.

    Rounds are steps of a slower optimizer with a momentum of its own (SlowMo, Wang et al., 2019,
    arXiv:1910.00643).
    """

    kind: Literal["slowmo"] = "slowmo"
    every: int = Field(default=12, ge=1)
    reset_momentum: bool = True
    alpha: float = Field(default=1.0, gt=0)
    """The slow learning rate, as a multiple of the steps' learning rate."""
    beta: float = Field(default=0.5, ge=0, lt=1)
    """The slow momentum; more ranks need a larger one."""

    def outer(self) -> OuterOptimizer:
        """Return SlowMo's rule, whose momentum is in units of the steps' learning rate."""
        alpha, beta = self.alpha, self.beta
        return OuterOptimizer(
            lambda s, u, outer_gradient, lr: outer_slowmo_(
                s, u, outer_gradient, lr=lr, alpha=alpha, beta=beta
            )
        )


class DiLoCoConfig(AveragedConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"diloco"``.

    Rounds are steps of Nesterov momentum along the mean change of all ranks (DiLoCo, Douillard et
    al., 2023, arXiv:2311.08105). With streaming, fragments of the model take turns and are sent
    while steps go on (Douillard et al., 2025, arXiv:2501.18512).
    """

    kind: Literal["diloco"] = "diloco"
    every: int = Field(default=500, ge=1)
    outer_lr: float = Field(default=0.7, gt=0)
    """Learning rate of the outer optimizer."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of the outer optimizer."""
    fragments: int = Field(default=1, ge=1)
    """Parts of the model that take turns; one is sent every ``every / fragments`` steps."""
    delay: int = Field(default=0, ge=0)
    """Steps that a rank makes while a fragment is in flight."""
    mix: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the way that parameters move to the synchronised values; 1 discards the steps
    made while the fragment was in flight. The paper's alpha is 1 - mix."""

    def outer(self) -> OuterOptimizer:
        """Return SGD with Nesterov momentum."""
        lr, momentum = self.outer_lr, self.outer_momentum
        return OuterOptimizer(
            lambda s, m, outer_gradient, _: outer_nesterov_(
                s, m, outer_gradient, lr=lr, momentum=momentum
            )
        )

    def streaming(self) -> Streaming:
        """Return the streaming settings."""
        return Streaming(self.fragments, self.delay, self.mix)

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        steps_between, rest = divmod(self.every, self.fragments)
        if rest:
            near = [str(n * self.fragments) for n in (steps_between, steps_between + 1) if n]
            raise ValueError(
                f"every = {self.every} steps cannot be shared by fragments = {self.fragments}, "
                f"which take turns at equal intervals: take every = {' or '.join(near)}"
            )
        if self.delay >= steps_between:
            raise ValueError(
                f"delay = {self.delay}: a fragment is sent every {steps_between} steps (every / "
                "fragments) and must have arrived before the next one is sent: take a delay of at "
                f"most {steps_between - 1}, or longer rounds"
            )
        return self


class NoLoCoConfig(LocalConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"noloco"``.

    In every round ranks average in random pairs and follow their pair's mean with a momentum of
    their own; there is no all-reduce (NoLoCo, Kolehmainen et al., 2025, arXiv:2506.10911).
    """

    kind: Literal["noloco"] = "noloco"
    every: int = Field(default=50, ge=1)
    outer_lr: float = Field(default=0.7, gt=0)
    """Learning rate of the outer optimizer."""
    outer_momentum: float = Field(default=0.5, ge=0, lt=1)
    """Momentum of the outer optimizer."""
    seed: int = Field(default=0, ge=0)
    """Seed of the random pairs."""
    wire: Literal["own"] = "own"
    """The type that parameters are sent as; a narrower one would round them."""

    def outer(self) -> OuterOptimizer:
        """Return NoLoCo's rule: follow the pair's mean with momentum."""
        lr, momentum = self.outer_lr, self.outer_momentum
        return OuterOptimizer(
            lambda s, m, outer_gradient, _: outer_noloco_(
                s, m, outer_gradient, lr=lr, momentum=momentum
            )
        )

    def build_topology(self) -> Topology:
        """Return the random pairs of each round."""
        return matching(self.seed)


AnyLocalConfig = LocalSGDConfig | PostLocalConfig | SlowMoConfig | DiLoCoConfig | NoLoCoConfig
