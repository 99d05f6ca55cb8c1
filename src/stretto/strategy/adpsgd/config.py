"""The settings of asynchronous gossip."""

from typing import Literal

from pydantic import Field

from stretto.config import Config
from stretto.topology.random_events import passive_peer


class ADPSGDConfig(Config):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"adpsgd"``.

    After each of its steps an even rank averages with an odd one, drawn anew, beside the next step;
    an odd rank answers at any time. Nobody waits for anybody's step (AD-PSGD, Lian et al., 2018,
    arXiv:1710.06952).
    """

    kind: Literal["adpsgd"] = "adpsgd"
    seed: int = Field(default=0, ge=0)
    """Of the peers."""
    wire: Literal["own"] = "own"
    """Parameters travel, not differences: a narrower type would round them."""

    def whom(self, rank: int, size: int, step: int) -> int | None:
        """Return to whom an active rank goes after ``step``; None: there is nobody."""
        return passive_peer(rank, size, step, self.seed)
