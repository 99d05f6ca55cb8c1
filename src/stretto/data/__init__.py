"""Data: which samples a rank computes in a step, and where they come from."""

from typing import Annotated, assert_never

from pydantic import Field

from stretto.data.images import Images, ImagesConfig
from stretto.data.loader import LoadedShare, Prefetch
from stretto.data.order import OrderedBatches, Share, sample_at, step_share, steps_per_epoch
from stretto.data.shapes import Shapes, ShapesConfig
from stretto.data.source import Account, Place, Skipped, Source
from stretto.data.text import Text, TextConfig

AnyDataConfig = ShapesConfig | TextConfig | ImagesConfig
DataConfig = Annotated[AnyDataConfig, Field(discriminator="kind")]
"""The ``[data]`` table of a run file; ``kind`` says which."""


def open_source(config: AnyDataConfig, *, train: bool) -> Source:
    """Return the training samples that ``config`` describes, or those kept for evaluation."""
    match config:
        case ShapesConfig():
            return Shapes(config, train=train)
        case TextConfig():
            return Text(config, train=train)
        case ImagesConfig():
            return Images(config, train=train)
        case _:
            assert_never(config)


__all__ = [
    "Account",
    "AnyDataConfig",
    "DataConfig",
    "Images",
    "ImagesConfig",
    "LoadedShare",
    "OrderedBatches",
    "Place",
    "Prefetch",
    "Shapes",
    "ShapesConfig",
    "Share",
    "Skipped",
    "Source",
    "Text",
    "TextConfig",
    "open_source",
    "sample_at",
    "step_share",
    "steps_per_epoch",
]
