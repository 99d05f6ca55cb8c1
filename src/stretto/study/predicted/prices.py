"""What a training step takes under each strategy and on each number of ranks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stretto.cluster.world import Mesh, World
from stretto.errors import ConfigError, StrettoError
from stretto.run import RunConfig
from stretto.sim.steps import StepPrice
from stretto.strategy import (
    ADPSGDConfig,
    AllReduceConfig,
    GossipConfig,
    NoLoCoConfig,
    ShardedConfig,
)
from stretto.strategy.local.config import AveragedConfig
from stretto.study.predicted.setting import Setting
from stretto.study.predicted.shards import price_sharded
from stretto.study.predicted.subject import Source, Subject
from stretto.study.predicted.sums import price_allreduce, price_averaged, price_pairs
from stretto.study.predicted.talks import price_asynchronous, price_gossip
from stretto.study.predicted.variants import Variant

PRICED: Sequence[tuple[type, Callable[[Setting], StepPrice]]] = (
    (AllReduceConfig, price_allreduce),
    (GossipConfig, price_gossip),
    (ADPSGDConfig, price_asynchronous),
    (AveragedConfig, price_averaged),
    (NoLoCoConfig, price_pairs),
    (ShardedConfig, price_sharded),
)
"""How the strategies of each sort are priced."""


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy on one number of ranks."""

    strategy: str
    """As it was asked for."""
    mesh: Mesh
    price: StepPrice | None
    left_out: str = ""
    """Why it has no price, where it has none."""


class Predictor:
    """Prices runs that differ in their strategies, and perhaps in their batch."""

    def __init__(self, source: Source, world: World, samples: int | None = None) -> None:
        """Make it; with ``samples``, so many are a rank's share, whatever the run's batch."""
        self._source, self._world, self._samples = source, world, samples
        self._subjects: dict[str, Subject] = {}

    def price(self, config: RunConfig, mesh: Mesh, longer: float = 1.0) -> StepPrice:
        """Return what a step of a run takes on ``mesh``, its computation so many times as long.

        Raises:
            ConfigError: It cannot be there, or cannot be priced before it runs.
        """
        for sort, pricing in PRICED:
            if isinstance(config.strategy, sort):
                return pricing(self._setting(config, mesh, longer))
        raise ConfigError(f"strategy.kind = {config.strategy.kind!r} has no price yet")

    def _setting(self, config: RunConfig, mesh: Mesh, longer: float) -> Setting:
        batched = with_samples(config, self._samples, mesh.size)
        # Whatever the strategy, what is computed is the same: it is counted once.
        key = batched.model_dump_json(exclude={"strategy"})
        if key not in self._subjects:
            self._subjects[key] = Subject(batched, self._world, self._source)
        subject = self._subjects[key]
        cluster = self._source.cluster.with_mesh(mesh)
        known = subject.known(mesh, longer)
        return Setting(config.strategy, subject, known, cluster, longer)


def with_samples(config: RunConfig, samples: int | None, ranks: int) -> RunConfig:
    """Return the run with a batch of so many samples for each rank; as it is where None."""
    if samples is None:
        return config
    train = config.train.model_copy(update={"batch": samples * ranks})
    return config.model_copy(update={"train": train})


def price_rows(
    variants: Sequence[Variant], meshes: Sequence[Mesh], predictor: Predictor
) -> Iterator[Row]:
    """Yield every strategy on every mesh, as soon as its price is known."""
    for mesh in meshes:
        for variant in variants:
            try:
                yield Row(variant.word, mesh, predictor.price(variant.config, mesh))
            except StrettoError as reason:
                yield Row(variant.word, mesh, None, str(reason))
