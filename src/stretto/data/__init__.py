"""Data: sample order, sample sources (generated shapes, text, image folders) and the prefetcher."""

from typing import Annotated, assert_never

from pydantic import Field

from stretto.data.images import ImageFolder, ImagesConfig
from stretto.data.loader import LoadedSamples, Prefetcher
from stretto.data.order import (
    DistributedBatchSampler,
    RankSamples,
    rank_samples,
    samples_at,
    steps_per_epoch,
)
from stretto.data.sample_source import HostContext, ReadStatistics, SampleSource, SkippedSample
from stretto.data.shapes import Shapes, ShapesConfig
from stretto.data.text import Text, TextConfig

AnyDataConfig = ShapesConfig | TextConfig | ImagesConfig
DataConfig = Annotated[AnyDataConfig, Field(discriminator="kind")]
"""The ``[data]`` table of a run file; ``kind`` selects the data set."""


def open_sample_source(config: AnyDataConfig, *, train: bool) -> SampleSource:
    """Return the training samples, or the evaluation samples, that ``config`` describes."""
    match config:
        case ShapesConfig():
            return Shapes(config, train=train)
        case TextConfig():
            return Text(config, train=train)
        case ImagesConfig():
            return ImageFolder(config, train=train)
        case _:
            assert_never(config)


__all__ = [
    "AnyDataConfig",
    "DataConfig",
    "DistributedBatchSampler",
    "HostContext",
    "ImageFolder",
    "ImagesConfig",
    "LoadedSamples",
    "Prefetcher",
    "RankSamples",
    "ReadStatistics",
    "SampleSource",
    "Shapes",
    "ShapesConfig",
    "SkippedSample",
    "Text",
    "TextConfig",
    "open_sample_source",
    "rank_samples",
    "samples_at",
    "steps_per_epoch",
]
