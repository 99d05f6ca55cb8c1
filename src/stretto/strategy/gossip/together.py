"""When ranks that gossip meet all at once: every so many steps, or when they are too far apart.

::

    begin           (step s+1) what was measured is read; is this a step that all end together?
    backward        (step s) each segment's sample, as it is before its update
    after_update    (step s) the sum of all samples begins; all meet, if the step is to end so

Note: all decide alike. A step that all end together is known when it begins, from the step and from
a sum that has the same bits everywhere: no rank looks at a clock, or at what has arrived.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from stretto.comm.channel import Channel
from stretto.comm.courier import Courier
from stretto.config import Config
from stretto.strategy.gossip.consensus import Consensus
from stretto.strategy.gossip.exact import ExactAverage
from stretto.strategy.gossip.mixer import Mixer


class TogetherConfig(Config):
    """When ranks are made equal, and when they measure how far apart they are."""

    exact_every: int | None = Field(default=None, ge=1)
    """Steps after which all ranks' models become their exact mean; None: never."""
    consensus_every: int | None = Field(default=None, ge=1)
    """Steps between two measurements of how far ranks are from their mean; None: never."""
    consensus_sample: float = Field(default=0.001, gt=0, le=1)
    """The share of parameters that is looked at for it."""
    consensus_limit: float | None = Field(default=None, gt=0)
    """How far apart ranks may be, as a share of the mean's norm, before they become that mean."""

    @property
    def averages(self) -> bool:
        """Whether there may be an exact average at all."""
        return self.exact_every is not None or self.consensus_limit is not None

    def averages_after(self, step: int) -> bool:
        """Say whether ``step`` ends with an exact average, whatever was measured."""
        return self.exact_every is not None and (step + 1) % self.exact_every == 0

    def measures_in(self, step: int) -> bool:
        """Say whether ranks look at what they begin ``step`` with."""
        return self.consensus_every is not None and (step + 1) % self.consensus_every == 0

    @model_validator(mode="after")
    def _limit_is_measured(self) -> Self:
        if self.consensus_limit is not None and self.consensus_every is None:
            raise ValueError(
                f"consensus_limit = {self.consensus_limit:g} is a distance that nobody measures: "
                "say how often with strategy.consensus_every, 10 for example, or leave the limit "
                "out"
            )
        return self


class Together:
    """Measures, decides and averages for one rank; all ranks call everything together."""

    def __init__(
        self,
        config: TogetherConfig,
        mixers: Sequence[Mixer],
        channel: Channel,
        courier: Courier,
    ) -> None:
        self._config = config
        self._average = ExactAverage(mixers, channel, courier) if config.averages else None
        segments = [mixer.values for mixer in mixers] if config.consensus_every else []
        self._consensus = Consensus(segments, config.consensus_sample, channel)
        self._step = 0
        self._asked = False
        self._met_since = False
        self.due = False
        """Whether this step ends with an exact average."""
        self.apart: float | None = None
        """How far ranks are from their mean, where that became known in this step."""

    def begin(self, step: int) -> None:
        """Read what was measured in the step before; decide how ``step`` ends."""
        self._read()
        self._step = step
        self.due = self._asked or self._config.averages_after(step)

    @property
    def looks(self) -> bool:
        """Whether ranks look at their segments in this step."""
        return self._config.measures_in(self._step)

    def see(self, segment: int) -> None:
        """Look at a segment, which has not been updated yet."""
        if self.looks:
            self._consensus.see(segment)

    def tell(self) -> None:
        """Begin to add up what was seen in this step, which has been made."""
        self.apart = None
        if self.looks:
            self._consensus.tell()
            self._met_since = self.due

    def meet(self) -> None:
        """Make all models their exact mean: the step is `due` to end so."""
        assert self._average is not None
        self._average()
        self.due = self._asked = False

    def state(self) -> dict[str, Tensor]:
        """Return what is known and has not been acted on; the same on all ranks."""
        self._read()
        if self._config.consensus_every is None:
            return {}
        apart = math.nan if self.apart is None else self.apart
        known = torch.tensor(apart, dtype=torch.float64)
        return {"apart": known, "asked": torch.tensor(self._asked)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take it back; nothing: nothing is known."""
        self._read()
        apart = float(state.get("apart", math.nan))
        self.apart = None if math.isnan(apart) else apart
        self._asked = self._config.averages and bool(state.get("asked", False))

    def close(self) -> None:
        """Wait for what nobody will read."""
        self._consensus.close()

    def _read(self) -> None:
        """Learn what was measured, if something was; too far apart asks for an average.

        Unless there has been one since.
        """
        apart, limit = self._consensus.read(), self._config.consensus_limit
        if apart is None:
            return
        self.apart = apart
        self._asked |= limit is not None and apart > limit and not self._met_since
