"""Settings of gossip: topology, segments, delay, wire type and groups."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from stretto.collectives.codecs import WIRE_DTYPES
from stretto.errors import ConfigError
from stretto.program.blocks import check_segments
from stretto.strategies.gossip.coded_wire import CODECS, checked_wire
from stretto.strategies.gossip.consensus import ConsensusConfig
from stretto.topology import Topology, TopologySettings, make_topology


class GossipConfig(ConsensusConfig):
    """Settings of all kinds of gossip."""

    topology: str = "derangement"
    """The peers of each round: "one-peer-exponential", "derangement", "ring", and so on."""
    peers: int = Field(default=1, ge=1)
    """Most peers of a rank in one round, for topologies with a choice."""
    segments: str = "whole"
    """How the model is cut into segments, which are mixed separately: "whole", "coarse", "fine", or
    "balanced 8"."""
    delay: int = Field(default=0, ge=0, le=8)
    """Rounds by which received values may be late; with 1, messages overlap a whole step."""
    every: int = Field(default=1, ge=1)
    """Steps between two rounds of gossip."""
    seed: int = Field(default=0, ge=0)
    """Seed of random topologies."""
    wire: str = "own"
    """The type that parameters are sent as: "own", "fp32", "bf16", "fp16", or "fp8" (as differences
    to the values that all ranks last had in common)."""
    lanes: int = Field(default=1, ge=1, le=16)
    """Segments in flight at once. With one lane segments arrive in the order in which they were
    sent, long before they are needed again. More lanes pay if a message's latency exceeds its
    transfer time; otherwise all segments arrive late."""
    groups: Annotated[int, Field(ge=1)] | Literal["hosts"] | None = None
    """Number of groups of neighbouring ranks that share one model, synchronised exactly; "hosts":
    one group per host. When not set, every rank is a group."""
    mix: Literal["parameters", "gradients"] = "parameters"
    """What is averaged with peers: parameters after the update, or gradients before it."""

    no_gradient_mixing_reason: ClassVar[str] = ""
    """Why this kind cannot mix gradients; empty if it can."""

    @property
    def mixes_gradients(self) -> bool:
        """Whether gradients are averaged before the update, and parameters are never sent."""
        return self.mix == "gradients"

    def warnings(self) -> list[str]:
        """Return warnings that the user should read before the first step."""
        is_synchronous = self.groups == 1 or (self.topology == "complete" and self.every == 1)
        if not self.mixes_gradients or is_synchronous or self.may_average_exactly:
            return []
        return [
            'strategy.mix = "gradients": parameters are not sent, so ranks drift apart and '
            "nothing pulls them together; evaluations and checkpoints use their mean. "
            'topology = "complete" with every = 1 gives all ranks one gradient; exact_every '
            "sets them to their mean now and then"
        ]

    @property
    def is_push_sum(self) -> bool:
        """Whether ranks push shares of their values and mass (push-sum) instead of differences."""
        return False

    def build_topology(self) -> Topology:
        """Return the topology.

        Raises:
            ConfigError: There is no topology of that name.
        """
        return make_topology(self.topology, TopologySettings(seed=self.seed, peers=self.peers))

    @field_validator("segments")
    @classmethod
    def _check_segments(cls, text: str) -> str:
        try:
            return check_segments(text)
        except ConfigError as wrong:
            raise ValueError(str(wrong)) from None

    _check_wire = field_validator("wire")(checked_wire)

    @model_validator(mode="after")
    def _check_gradient_mixing(self) -> Self:
        if self.mixes_gradients and self.no_gradient_mixing_reason:
            raise ValueError(
                f'mix = "gradients": {self.no_gradient_mixing_reason}; kind = "crossover" can'
            )
        if self.mixes_gradients and self.delay:
            raise ValueError(
                f'mix = "gradients" with delay = {self.delay}: the update waits for the '
                "gradients of peers, so none can be late: set delay = 0"
            )
        if self.mixes_gradients and self.wire in CODECS:
            raise ValueError(
                f'mix = "gradients" with wire = "{self.wire}": that wire sends differences to '
                "parameters that all ranks had in common, and gradients have no such reference: "
                f"take {', '.join(WIRE_DTYPES)}"
            )
        return self

    @model_validator(mode="after")
    def _check_topology(self) -> Self:
        try:
            topology = self.build_topology()
        except ConfigError as wrong:
            raise ValueError(str(wrong)) from None
        if not topology.doubly_stochastic and not self.is_push_sum:
            raise ValueError(
                f"{self.topology} does not preserve the mean by itself: take strategy.kind = "
                "'sgp', which sends weights along"
            )
        return self


class CrossoverConfig(GossipConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"crossover"``.

    Every rank steps with its own gradients. Then each segment is averaged with that of a random
    peer, drawn anew for each segment and step (Crossover-SGD, arXiv:2012.15198).
    """

    kind: Literal["crossover"] = "crossover"
    segments: str = "fine"


class DPSGDConfig(GossipConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"dpsgd"``.

    Ranks mix the parameters from before a step, during that step, and add their update to the
    result (D-PSGD, Lian et al., 2017, arXiv:1705.09056).
    """

    kind: Literal["dpsgd"] = "dpsgd"
    topology: str = "ring"
    delay: int = Field(default=1, ge=1, le=8)

    no_gradient_mixing_reason: ClassVar[str] = (
        "D-PSGD mixes the parameters from before a step, when there is no gradient yet"
    )


class SGPConfig(GossipConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"sgp"``.

    Ranks push weighted shares of their parameters to peers, and divide their sums by the sum of
    weights (Stochastic Gradient Push, Assran et al., 2019, arXiv:1811.10792).
    """

    kind: Literal["sgp"] = "sgp"
    topology: str = "one-peer-exponential"
    wire: Literal["own"] = "own"
    """The type that parameters and masses are sent as; a narrower one would lose mass."""

    no_gradient_mixing_reason: ClassVar[str] = (
        "masses are shares of parameters, and gradients have none"
    )

    @property
    def is_push_sum(self) -> bool:
        """True: SGP is push-sum."""
        return True


AnyGossipConfig = CrossoverConfig | DPSGDConfig | SGPConfig
