"""What a recipe is: tables of settings, as a run file would hold them."""

from collections.abc import Mapping

Recipe = Mapping[str, Mapping[str, object]]
"""Laid over the defaults and under a run file by `stretto.config.load`."""
