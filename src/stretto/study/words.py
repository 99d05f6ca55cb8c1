"""Strategies as they are said on a command line: a kind, with settings behind it."""

from stretto.config.text import suggestion
from stretto.errors import ConfigError
from stretto.strategy import STRATEGIES


def strategy_word(word: str) -> tuple[str, list[str]]:
    """Return the kind that a word names, and the overrides behind it: "crossover:delay=1".

    Raises:
        ConfigError: There is no such strategy, or what follows is no setting.
    """
    kind, *settings = word.split(":")
    if kind not in STRATEGIES:
        raise ConfigError(f"no strategy {kind!r}{suggestion(kind, list(STRATEGIES), 'known')}")
    for setting in settings:
        if "=" not in setting:
            raise ConfigError(f"strategy {word!r}: expected {kind}:key=value, got {setting!r}")
    return kind, [f"strategy.{setting}" for setting in settings]
