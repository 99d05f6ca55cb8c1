"""The settings of gossip: who talks to whom, about what, and how late what was said may count."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from stretto.comm.buckets import WIRE
from stretto.errors import ConfigError
from stretto.strategy.gossip.coded import CODECS, checked_wire
from stretto.strategy.gossip.segments import check_cut
from stretto.strategy.gossip.together import TogetherConfig
from stretto.topology import Settings, Topology, named


class GossipConfig(TogetherConfig):
    """What all gossip has in common."""

    topology: str = "derangement"
    """Who talks to whom: "one-peer-exponential", "derangement", "ring", and so on."""
    peers: int = Field(default=1, ge=1)
    """The most peers of a rank in one round, where a topology leaves the choice."""
    segments: str = "whole"
    """What is mixed on its own: "whole", "coarse", "fine", or "balanced 8"."""
    delay: int = Field(default=0, ge=0, le=8)
    """By how many rounds later than said something may be heard: with 1, messages have a whole step
    to travel."""
    every: int = Field(default=1, ge=1)
    """Steps between two rounds of gossip."""
    seed: int = Field(default=0, ge=0)
    """Of topologies that are drawn."""
    wire: str = "own"
    """What parameters travel as: "own", "fp32", "bf16", "fp16"; "fp8", as differences to what all
    last had in common."""
    lanes: int = Field(default=1, ge=1, le=16)
    """Segments that travel at once. One after another they arrive in the order in which they left,
    long before they are needed again; beside each other all arrive late, and links idle until they
    leave anew. More pay where a message's latency is longer than its bytes."""
    groups: Annotated[int, Field(ge=1)] | Literal["hosts"] | None = None
    """Ranks in a row are so many groups of one model each, exact inside; "hosts": each host is one.
    When not set, every rank is."""
    mix: Literal["parameters", "gradients"] = "parameters"
    """What is averaged with peers: parameters after the update, or gradients before it."""

    why_parameters: ClassVar[str] = ""
    """Why nothing but parameters can be mixed, where that is so."""

    @property
    def mixes_gradients(self) -> bool:
        """Whether gradients are averaged before the update, and parameters never travel."""
        return self.mix == "gradients"

    def remarks(self) -> list[str]:
        """Return what people should know before the first step."""
        alike = self.groups == 1 or (self.topology == "complete" and self.every == 1)
        if not self.mixes_gradients or alike or self.averages:
            return []
        return [
            'strategy.mix = "gradients": parameters do not travel, so ranks drift apart and '
            "nothing pulls them together; what evaluations and checkpoints see is their mean. "
            'topology = "complete" with every = 1 gives all of them one gradient; exact_every '
            "makes them their mean again"
        ]

    @property
    def pushes(self) -> bool:
        """Whether shares of mass are pushed, with weights; else differences are mixed."""
        return False

    def who(self) -> Topology:
        """Return the topology.

        Raises:
            ConfigError: There is none of that name.
        """
        return named(self.topology, Settings(seed=self.seed, peers=self.peers))

    @field_validator("segments")
    @classmethod
    def _known_cut(cls, text: str) -> str:
        try:
            return check_cut(text)
        except ConfigError as wrong:
            raise ValueError(str(wrong)) from None

    _known_wire = field_validator("wire")(checked_wire)

    @model_validator(mode="after")
    def _gradients_can_be_mixed(self) -> Self:
        if self.mixes_gradients and self.why_parameters:
            raise ValueError(f'mix = "gradients": {self.why_parameters}; kind = "crossover" can')
        if self.mixes_gradients and self.delay:
            raise ValueError(
                f'mix = "gradients" with delay = {self.delay}: the update waits for what peers '
                "say of its gradients, so nothing can be late: set delay = 0"
            )
        if self.mixes_gradients and self.wire in CODECS:
            raise ValueError(
                f'mix = "gradients" with wire = "{self.wire}": that tells how far parameters are '
                f"from those all last had, and gradients have nothing like it: {', '.join(WIRE)}"
            )
        return self

    @model_validator(mode="after")
    def _known_topology(self) -> Self:
        try:
            topology = self.who()
        except ConfigError as wrong:
            raise ValueError(str(wrong)) from None
        if not topology.doubly_stochastic and not self.pushes:
            raise ValueError(
                f"{self.topology} does not keep the mean by itself: take strategy.kind = 'sgp', "
                "which sends weights along"
            )
        return self


class CrossoverConfig(GossipConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"crossover"``.

    Every rank steps by its own gradients; then each segment goes to a peer of its own, drawn anew
    in every step, and the two are averaged (Crossover-SGD, arXiv:2012.15198).
    """

    kind: Literal["crossover"] = "crossover"
    segments: str = "fine"


class DPSGDConfig(GossipConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"dpsgd"``.

    Ranks mix what they had before a step, beside that step, and add their update to it (D-PSGD,
    Lian et al., 2017, arXiv:1705.09056).
    """

    kind: Literal["dpsgd"] = "dpsgd"
    topology: str = "ring"
    delay: int = Field(default=1, ge=1, le=8)

    why_parameters: ClassVar[str] = (
        "D-PSGD mixes what ranks had before a step, and they had no gradient then"
    )


class SGPConfig(GossipConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"sgp"``.

    Ranks push shares of their parameters along, with weights by which what they have is divided
    (Stochastic Gradient Push, Assran et al., 2019, arXiv:1811.10792).
    """

    kind: Literal["sgp"] = "sgp"
    topology: str = "one-peer-exponential"
    wire: Literal["own"] = "own"
    """Masses travel with parameters: a narrower type would lose some."""

    why_parameters: ClassVar[str] = "masses are shares of parameters, and gradients have none"

    @property
    def pushes(self) -> bool:
        """Shares of mass are pushed."""
        return True


AnyGossipConfig = CrossoverConfig | DPSGDConfig | SGPConfig
