"""The settings of gossip: who talks to whom, about what, and how late what was said may count."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from stretto.comm.buckets import WIRE
from stretto.config import Config
from stretto.errors import ConfigError
from stretto.strategy.gossip.segments import check_cut
from stretto.topology import Settings, Topology, named


class GossipConfig(Config):
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
    """What parameters travel as: "own", "fp32", "bf16", "fp16"."""
    lanes: int = Field(default=8, ge=1, le=16)
    """Segments that travel at once."""

    @property
    def pushes(self) -> bool:
        """Whether shares of mass are pushed, with weights; else differences are mixed."""
        return False

    def who(self) -> Topology:
        """Return the topology.

        Raises:
            ConfigError: There is none of that name.
        """
        k = {"k": self.peers} if self.peers != 1 else {}
        return named(self.topology, Settings(seed=self.seed, **k))

    @field_validator("segments")
    @classmethod
    def _known_cut(cls, text: str) -> str:
        try:
            return check_cut(text)
        except ConfigError as wrong:
            raise ValueError(str(wrong)) from None

    @field_validator("wire")
    @classmethod
    def _known_wire(cls, text: str) -> str:
        if text not in WIRE:
            raise ValueError(f"parameters travel as {', '.join(WIRE)}, not {text!r}")
        return text

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


class SGPConfig(GossipConfig):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"sgp"``.

    Ranks push shares of their parameters along, with weights by which what they have is divided
    (Stochastic Gradient Push, Assran et al., 2019, arXiv:1811.10792).
    """

    kind: Literal["sgp"] = "sgp"
    topology: str = "one-peer-exponential"
    wire: Literal["own"] = "own"
    """Masses travel with parameters: a narrower type would lose some."""

    @property
    def pushes(self) -> bool:
        """Shares of mass are pushed."""
        return True


AnyGossipConfig = CrossoverConfig | DPSGDConfig | SGPConfig
