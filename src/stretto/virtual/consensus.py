"""How far stacked models are apart by the sample that ranks would tell, and what follows from it.

`stretto.strategy.gossip.together` does the same for one rank: what a step begins with is measured
beside it and read when the next one begins, which then ends with an exact average.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stretto.strategy.gossip.consensus import distance, sampled
from stretto.strategy.gossip.together import TogetherConfig


class StackedConsensus:
    """Measures all parties, where somebody acts on it."""

    def __init__(self, config: TogetherConfig, segments: Sequence[Sequence[Tensor]]) -> None:
        """Make it for segments of [P, ...], first layers first; ranks count from the last."""
        self._config, self._segments = config, list(segments)[::-1]
        sizes = [sum(value[0].numel() for value in values) for values in self._segments]
        self._sample = sampled(sizes, config.consensus_sample)
        self.asks = False
        """Whether the next step is to end with an exact average."""
        self._at_begin = 0.0

    def end(self, step: int, *, met: bool) -> None:
        """Read what ``step`` began with, unless all have met; measure for the next one."""
        limit = self._config.consensus_limit
        if limit is None:
            return
        self.asks = self._config.measures_in(step) and self._at_begin > limit and not met
        if self._config.measures_in(step + 1):
            self._at_begin = self._distance()

    def _distance(self) -> float:
        seen, norms = [], 0.0
        for values, places in zip(self._segments, self._sample.places, strict=True):
            flat = torch.cat([value.flatten(1) for value in values], dim=1).double()
            seen.append(flat[:, torch.from_numpy(places).to(flat.device)])
            norms += float(flat.square().sum())
        rows = torch.cat(seen, dim=1).cpu().numpy()
        weights = self._sample.weights
        squares = float((weights * np.square(rows)).sum())
        return distance(rows.sum(axis=0), weights, squares, norms, len(rows))
