"""The settings of local updates: how long ranks step by themselves, and where they begin again."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from stretto.cluster.world import Mesh
from stretto.comm.algorithms.table import AlgorithmTable, parse_table
from stretto.comm.buckets import checked_type
from stretto.config import Config
from stretto.errors import ConfigError
from stretto.optim.outer import average_, nesterov_, noloco_, slowmo_
from stretto.optim.rules import Tensors
from stretto.sim.choosing import usual_table
from stretto.topology import Topology, matching

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Outer:
    """Where ranks begin again: a rule of `stretto.optim.outer`, its settings filled in."""

    rule: Callable[[Tensors, Tensors, Tensors, float], None]
    """Takes starts, momenta, how far peers have moved, and the rate of the step; in place."""
    remembers: bool = True
    """Whether it has momenta."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """In how many parts, how late and how far a model takes in what its peers have come to."""

    fragments: int = 1
    delay: int = 0
    mix: float = 1.0


class LocalConfig(Config):
    """What all local updates have in common."""

    every: int = Field(default=8, ge=1)
    """Steps from one round to the next, in which ranks begin again together."""
    reset_momentum: bool = False
    """Whether a round empties the momentum of SGD or LARS; what Adam remembers stays."""

    @abstractmethod
    def outer(self) -> Outer:
        """Return the rule that says where ranks begin again."""

    def streaming(self) -> Streaming:
        """Return how a round is streamed: whole and at once, unless a kind says otherwise."""
        return Streaming()

    def turn(self, step: int) -> int | None:
        """Return whose turn it is to leave after ``step``, from fragment 0 on; None: nobody's.

        A function of the step alone: a step left out, or a resumed run, parts no ranks.
        """
        fragments = self.streaming().fragments
        number, within = divmod(step + 1, self.every // fragments)
        return None if within else (number - 1) % fragments


class AveragedConfig(LocalConfig):
    """What has rounds of all ranks; they begin again at the mean, unless a kind says otherwise."""

    algorithm: str = AUTO
    """The all-reduce that carries a round, by size: "ring", or "doubling, hierarchical/8 from 1MB";
    "auto" is the cheapest on links as they are usual."""
    wire: str = "own"
    """What differences travel as: "own", "fp32", "bf16", "fp16"; those of parameters of 16 bits
    are of 32 by themselves."""

    def outer(self) -> Outer:
        """Begin again at the mean."""
        return Outer(lambda starts, _, moved, _lr: average_(starts, moved), remembers=False)

    def table(self, mesh: Mesh, *, on_gpu: bool) -> AlgorithmTable:
        """Return which all-reduce carries a message of which size."""
        if self.algorithm != AUTO:
            return parse_table(self.algorithm)
        return usual_table(mesh, on_gpu=on_gpu)

    @field_validator("algorithm")
    @classmethod
    def _known_algorithms(cls, text: str) -> str:
        try:
            return text if text == AUTO else str(parse_table(text))
        except ConfigError as wrong:
            raise ValueError(str(wrong)) from None

    _known_wire = field_validator("wire")(checked_type)


class LocalSGDConfig(AveragedConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"local_sgd"``.

    Ranks step by themselves, then their parameters are averaged (Stich, 2018, arXiv:1805.09767).
    """

    kind: Literal["local_sgd"] = "local_sgd"


class PostLocalConfig(AveragedConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"post_local"``.

    Parameters are averaged after every step at first, later as in local_sgd (Lin et al., 2018,
    arXiv:1808.07217, who change over where the rate first falls). For SGD, with or without
    momentum, the first part is synchronous training.
    """

    kind: Literal["post_local"] = "post_local"
    from_step: int = Field(default=0, ge=0)
    """Steps after each of which ranks begin again together; 0 is local_sgd."""

    def turn(self, step: int) -> int | None:
        """Let all leave after every step before ``from_step``."""
        return 0 if step < self.from_step else super().turn(step)


class SlowMoConfig(AveragedConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"slowmo"``.

    Rounds are steps of a slower optimizer with a momentum of its own (SlowMo, Wang et al., 2019,
    arXiv:1910.00643).
    """

    kind: Literal["slowmo"] = "slowmo"
    every: int = Field(default=12, ge=1)
    reset_momentum: bool = True
    alpha: float = Field(default=1.0, gt=0)
    """The slow rate, in units of the rate of the steps."""
    beta: float = Field(default=0.5, ge=0, lt=1)
    """The slow momentum; more workers want more."""

    def outer(self) -> Outer:
        """Remember rounds in units of the rate."""
        alpha, beta = self.alpha, self.beta
        return Outer(lambda s, u, moved, lr: slowmo_(s, u, moved, lr=lr, alpha=alpha, beta=beta))


class DiLoCoConfig(AveragedConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"diloco"``.

    Rounds are steps of Nesterov's rule along how far ranks have moved on average (DiLoCo, Douillard
    et al., 2023, arXiv:2311.08105). Streaming (Douillard et al., 2025, arXiv:2501.18512): parts of
    the model take turns, and travel while steps go on.
    """

    kind: Literal["diloco"] = "diloco"
    every: int = Field(default=500, ge=1)
    outer_lr: float = Field(default=0.7, gt=0)
    """The rate of rounds."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """The momentum of rounds."""
    fragments: int = Field(default=1, ge=1)
    """Parts of the model that take turns, one in every / fragments steps."""
    delay: int = Field(default=0, ge=0)
    """Steps that go on while a fragment travels."""
    mix: float = Field(default=1.0, gt=0, le=1)
    """How far a rank goes from what it has to where all begin again, when that arrives; 1 forgets
    the steps made meanwhile. The paper's alpha is 1 - mix."""

    def outer(self) -> Outer:
        """Step by Nesterov's rule."""
        lr, momentum = self.outer_lr, self.outer_momentum
        return Outer(lambda s, m, moved, _: nesterov_(s, m, moved, lr=lr, momentum=momentum))

    def streaming(self) -> Streaming:
        """Return what the settings say."""
        return Streaming(self.fragments, self.delay, self.mix)

    @model_validator(mode="after")
    def _turns_fit(self) -> Self:
        apart, rest = divmod(self.every, self.fragments)
        if rest:
            near = [str(n * self.fragments) for n in (apart, apart + 1) if n]
            raise ValueError(
                f"every = {self.every} steps cannot be shared by fragments = {self.fragments}, "
                f"which take turns at equal distances: take every = {' or '.join(near)}"
            )
        if self.delay >= apart:
            raise ValueError(
                f"delay = {self.delay}: a fragment leaves every {apart} steps (every / fragments) "
                "and must have arrived before the next one leaves: take a delay of at most "
                f"{apart - 1}, or longer rounds"
            )
        return self


class NoLoCoConfig(LocalConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"noloco"``.

    In every round ranks meet in pairs, drawn anew, and follow their pair's mean with a momentum of
    their own: nothing is sent to all (NoLoCo, Kolehmainen et al., 2025, arXiv:2506.10911).
    """

    kind: Literal["noloco"] = "noloco"
    every: int = Field(default=50, ge=1)
    outer_lr: float = Field(default=0.7, gt=0)
    """The rate of rounds."""
    outer_momentum: float = Field(default=0.5, ge=0, lt=1)
    """The momentum of rounds."""
    seed: int = Field(default=0, ge=0)
    """Of the pairs."""
    wire: Literal["own"] = "own"
    """Parameters travel, not differences: a narrower type would round them."""

    def outer(self) -> Outer:
        """Follow the pair's mean."""
        lr, momentum = self.outer_lr, self.outer_momentum
        return Outer(lambda s, m, moved, _: noloco_(s, m, moved, lr=lr, momentum=momentum))

    def who(self) -> Topology:
        """Return the pairs."""
        return matching(self.seed)


AnyLocalConfig = LocalSGDConfig | PostLocalConfig | SlowMoConfig | DiLoCoConfig | NoLoCoConfig
