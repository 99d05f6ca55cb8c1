"""One run of a study: from a run file and a cell to what virtual workers come to."""

import atexit
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from stretto.data import AnyDataConfig, Place, Source, open_source
from stretto.errors import ConfigError
from stretto.model import build_model
from stretto.recipes import load_run
from stretto.run import Prepared, RunConfig
from stretto.strategy import AllReduceConfig, AnyStrategyConfig, ShardedConfig
from stretto.study.scaling.sweep import Cell, Done
from stretto.study.words import strategy_word
from stretto.virtual import Told, train_virtually


@dataclass(frozen=True, slots=True)
class Basis:
    """What all runs of a study have in common; small and plain, to be sent to other processes."""

    run: str
    """A run file, or a recipe's name."""
    overrides: tuple[str, ...] = ()
    threads: int = 1
    lost: float = 0.0
    """The share of gossip's messages that never arrive."""
    device: str = "cpu"

    def config(self, cell: Cell) -> RunConfig:
        """Return the settings of one run.

        Raises:
            ConfigError: The strategy, or a setting of it, is not known.
        """
        lr = self._load(cell).optim.lr
        return self._load(cell, f"optim.lr={lr * cell.factor!r}")

    def lost_by(self, strategy: AnyStrategyConfig) -> float:
        """Return the share that ``strategy`` goes without: exact ones wait for every message."""
        exact = isinstance(strategy, AllReduceConfig | ShardedConfig)
        return 0.0 if exact else self.lost

    def _load(self, cell: Cell, *more: str) -> RunConfig:
        kind, settings = strategy_word(cell.point.strategy)
        overrides = [
            *self.overrides,
            f"strategy.kind={kind}",
            *settings,
            f"train.batch={cell.point.batch}",
            f"run.seed={cell.seed}",
            *more,
        ]
        return load_run(Path(self.run), overrides).config


def run_cell(basis: Basis, cell: Cell, tell: Told = lambda *_: None) -> Done:
    """Train the virtual workers of ``cell``."""
    torch.set_num_threads(basis.threads)
    config = basis.config(cell)
    model = build_model(config.model, config.run.seed)
    prepared = Prepared(*_sources(config.data), model)
    lost = basis.lost_by(config.strategy)
    outcome = train_virtually(
        config, prepared, cell.point.workers, tell, lost=lost, device=basis.device
    )
    if outcome.diverged or not outcome.evaluations:
        return Done(0.0, seconds=outcome.seconds, diverged=outcome.diverged or "never evaluated")
    last = outcome.evaluations[-1]
    if last.accuracy is None:
        raise ConfigError("a study compares accuracies: this task has none")
    return Done(
        last.accuracy,
        last.own_accuracy,
        last.loss,
        outcome.apart,
        outcome.seconds,
        outcome.samples_per_s,
    )


@lru_cache(maxsize=1)
def _sources(config: AnyDataConfig) -> tuple[Source, Source]:
    """Return training and test samples, opened once for all runs of this process."""
    sources = open_source(config, train=True), open_source(config, train=False)
    for source in sources:
        source.start(Place(0, 1, f"study-{os.getpid()}", lambda: None))
        atexit.register(source.close)
    return sources
