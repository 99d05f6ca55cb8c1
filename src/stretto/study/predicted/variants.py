"""The strategies that are compared: the run's own, or others in its place."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.recipes import load_run
from stretto.run import RunConfig
from stretto.strategy import STRATEGIES
from stretto.study.words import strategy_word

ALL = "all"


@dataclass(frozen=True, slots=True)
class Variant:
    """A run under one strategy."""

    word: str
    """What it was asked for as: a kind, and settings that are its own."""
    config: RunConfig
    overrides: tuple[str, ...]
    """What is laid over the run file for it."""


def find_variants(run: Path, overrides: Sequence[str], words: str) -> list[Variant]:
    """Return the run under each strategy that ``words`` name; its own where there are none.

    As "allreduce,crossover:delay=1", or "all". A strategy of the run's own kind keeps what the run
    says of it; another one starts anew, and has none of the run's ``strategy`` settings.

    Raises:
        ConfigError: There is no such strategy, or some setting of it.
    """
    mine = load_run(run, overrides).config.strategy.kind
    found = [word.strip() for word in words.split(",") if word.strip()] or [mine]
    wanted = list(STRATEGIES) if words.strip() == ALL else list(dict.fromkeys(found))
    return [_variant(run, word, mine, overrides) for word in wanted]


def _variant(run: Path, word: str, mine: str, overrides: Sequence[str]) -> Variant:
    kind, settings = strategy_word(word)
    common = list(overrides)
    if kind != mine:
        common = [one for one in overrides if not one.strip().startswith("strategy.")]
        common.append(f"strategy.kind={kind}")
    laid = (*common, *settings)
    return Variant(word, load_run(run, laid).config, laid)
