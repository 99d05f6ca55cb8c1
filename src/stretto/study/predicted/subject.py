"""What is priced: a run's model and its computation, known from a profile or counted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch import nn

from stretto.cluster.world import Mesh, World
from stretto.measure.estimate import Subject as Estimated
from stretto.measure.estimate import on_meta, seen_units
from stretto.plan.profile import Profile, check_same_units, read_profile
from stretto.plan.units import ModelUnit
from stretto.run import RunConfig
from stretto.sim.cluster import Cluster
from stretto.strategy.sharded.config import ShardedConfig
from stretto.study.predicted.line import Line, line_of
from stretto.study.profiling import ingredients_of
from stretto.train.estimated import Ingredients, estimate_profile

_FINEST = ShardedConfig(unit=0)
"""Cuts a model into units as small as there are, where nobody measured other ones."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where seconds are from."""

    cluster: Cluster
    """Links and cores; its hosts and ranks do not matter."""
    called: str
    """How people call it."""
    profile: Path | None = None
    """What a model takes; estimated where there is none."""
    device: str = "cpu"
    """What an estimate is for."""

    @property
    def on_gpu(self) -> bool:
        """Whether ranks compute on GPUs."""
        return self.device != "cpu"


@dataclass(frozen=True, slots=True)
class Known:
    """A model, and what computing a step of it takes on each of some ranks."""

    model: nn.Module
    """Without numbers."""
    calls: tuple[str, ...]
    """The modules that its forward calls."""
    line: Line


class _Seen(NamedTuple):
    """What does not depend on how many ranks share the cores."""

    model: nn.Module
    calls: tuple[str, ...]
    units: tuple[ModelUnit, ...]
    profile: Profile


class Subject:
    """A run that is priced on several numbers of ranks; what they have in common is found once."""

    def __init__(self, config: RunConfig, world: World, source: Source) -> None:
        self.config, self.source = config, source
        self._world = world
        self._saved = None if source.profile is None else read_profile(source.profile)
        self._seen = cache(self._see)

    def known(self, mesh: Mesh, longer: float = 1.0) -> Known:
        """Return what is known of the run on ``mesh``, its computation so many times as long.

        Raises:
            ConfigError: The profile is of another model, or the model does not run.
        """
        share, pieces = self._share(mesh)
        seen = self._seen(share, pieces)
        line = line_of(seen.profile, seen.units, pieces, longer * self._crowd(mesh.size))
        return Known(seen.model, seen.calls, line)

    def profile_for(self, strategy: ShardedConfig, mesh: Mesh, longer: float) -> Profile:
        """Return the profile of a sharded run, its link that of the described cluster.

        Raises:
            ConfigError: The profile has other units.
        """
        there = self.source.cluster.with_mesh(mesh)
        like = self._ingredients(strategy, *self._share(mesh))
        found = estimate_profile(like, there, self.source.device, self.source.called)
        if self._saved is not None:
            name = str(self.source.profile)
            check_same_units(self._saved, found.shapes, name)
            found = self._saved.model_copy(update={"link": found.link})
        longer *= self._crowd(mesh.size)
        units = tuple(unit.stretched(longer) for unit in found.units)
        return found.model_copy(update={"units": units, "update_s": found.update_s * longer})

    def _share(self, mesh: Mesh) -> tuple[int, int]:
        """Return the samples of a rank, and in how many micro-batches they go through."""
        share = max(1, self.config.train.batch // mesh.size)
        return share, self.config.train.pieces(mesh.size)

    def _crowd(self, ranks: int) -> float:
        """Return how many times as long it takes where ranks share one machine's cores.

        A profile has that of its own ranks in it.
        """
        cpu = self.source.cluster.cpu
        if cpu.pool != "shared":
            return 1.0
        before = 1 if self._saved is None else self._saved.link.ranks
        return max(1.0, -(-ranks // cpu.cores)) / max(1.0, -(-before // cpu.cores))

    def _see(self, share: int, pieces: int) -> "_Seen":
        cut = _FINEST
        if self._saved is not None:
            cut = ShardedConfig(unit=self._saved.unit_bytes)
        like = self._ingredients(cut, share, pieces)
        units, calls = seen_units(_estimated(like, cut.unit or 0))
        profile = self._saved
        if profile is None:
            alone = self.source.cluster.with_mesh(Mesh((1,)))
            profile = estimate_profile(like, alone, self.source.device, self.source.called)
        else:
            shapes = [unit.shape for unit in units]
            check_same_units(profile, shapes, str(self.source.profile))
        return _Seen(on_meta(like.model), calls, tuple(units), profile)

    def _ingredients(self, strategy: ShardedConfig, share: int, pieces: int) -> Ingredients:
        """Return what one rank computes at once: of its share, a micro-batch."""
        train = self.config.train.model_copy(
            update={"batch": -(-share // pieces), "accumulation": 1, "micro_batch": None}
        )
        config = self.config.model_copy(update={"strategy": strategy, "train": train})
        return ingredients_of(config, replace(self._world, rank=0, mesh=Mesh((1,))), None)


def _estimated(like: Ingredients, unit_bytes: int) -> Estimated:
    def find(model: nn.Module, calls: Sequence[str]) -> list[ModelUnit]:
        return like.find(model, calls, unit_bytes)

    return Estimated(like.model, like.loss, like.batch, find)
