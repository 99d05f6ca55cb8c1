"""The ``[data]`` table of image folders, and the form in which decoded images are stored."""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from stretto.config import Config
from stretto.data.images.decoder import EXTENT
from stretto.units import Bytes

U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Form:
    """How an image is stored: a square of ``side`` x ``side`` pixels, or the whole image.

    A row of the cache holds one image in this form, and every augmentation starts from it. A sample
    therefore has the same bits whether it came from the cache or was decoded just now.
    """

    side: int
    is_whole: bool = False
    """Store the whole image in its own proportions, with its width and height before the pixels. It
    is shrunk to at most side x side pixels and never enlarged.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row of bytes that holds any image in this form."""
        pixels = (self.side, self.side, 3)
        return (EXTENT.size + 3 * self.side**2,) if self.is_whole else pixels


def write_row(row: U8, content: bytes) -> None:
    """Write ``content``, as the decoder sent it, into ``row``; fill the rest with 0."""
    flat = row.reshape(-1)
    flat[: len(content)] = np.frombuffer(content, np.uint8)
    flat[len(content) :] = 0


def image_sizes(rows: U8) -> NDArray[np.int64]:
    """Return width and height of the whole images in ``rows``, [B, 2]."""
    return np.ascontiguousarray(rows[:, : EXTENT.size]).view("<u4").astype(np.int64)


MAX_DECODERS = 8
"""Default limit of decoders per rank and split; more would be idle or slow down other ranks."""


Augmentation = Literal["none", "flip", "pad_crop", "crop", "area_crop"]
AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)


class ImagesConfig(Config):
    """The ``[data]`` table of a run whose ``kind`` is ``"images"``."""

    kind: Literal["images"] = "images"
    path: str
    """Folder with ``train/CLASS/*.jpg`` and ``test/CLASS/*.jpg`` or ``val/CLASS/*.jpg``; a
    relative path counts from the working directory."""
    size: int = Field(default=224, ge=8)
    """Height and width of the model's inputs, in pixels."""
    store: int | None = Field(default=None, ge=8)
    """Side of the square that is decoded and cached per image, before augmentation. Default: 8/7 of
    size for augment "crop" (256 for 224), size for the others. For "area_crop" the whole image
    is stored, shrunk to at most store x store pixels; the default is then 12/7 of size (384 for
    224). A smaller value blurs small crops, a larger one needs more cache.
    """
    augment: Augmentation = "crop"
    """Augmentation of training samples, drawn anew in each epoch. "none": the centre; "flip":
    mirrored or not; "crop": a random window of the stored square, and flip; "pad_crop": the same
    after reflecting size/8 pixels at each edge, as is usual for CIFAR; "area_crop": a rectangle
    of random area and aspect of the whole image, resized to size x size, and flip, as is usual
    for ImageNet. Evaluation always takes the centre; for "area_crop" the image is first scaled
    so that its shorter side is 8/7 of size.
    """
    area: tuple[float, float] = AREA
    """Smallest and largest fraction of the image's area that "area_crop" cuts out."""
    aspect: tuple[float, float] = ASPECT
    """Smallest and largest width over height of the rectangle of "area_crop", before resizing."""
    plain_from_epoch: int | None = Field(default=None, ge=0)
    """First pass over the training data, counted from 0, in which "area_crop" cuts out nearly whole
    images: area 0.999 to 1 and aspect 1, or the largest square at the centre where that does not
    fit. Never when not set.
    """
    seed: int = 0
    """Seed of the crops and flips."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of red, green and blue as fractions of full brightness, subtracted from the inputs;
    ImageNet's by default.
    """
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """Standard deviation by which red, green and blue are then divided; ImageNet's by default."""
    decoders: int | None = Field(default=None, ge=1, le=64)
    """Decoder processes per rank, for training and again for evaluation. Default: the rank's share
    of the host's cores, at most 8.
    """
    cache: Literal["none", "memory", "file"] = "memory"
    """Where decoded images are kept for later epochs, shared by all ranks of a host. "memory":
    until the run ends; "file": in cache_folder, for later runs as well; "none": nowhere.
    """
    cache_size: Bytes | None = Field(default=None, ge=1)
    """Largest size of the cached images of one host, training and evaluation together. Default:
    2GB, or half of the free space if that is less. Samples that do not fit are decoded in every
    epoch.
    """
    cache_folder: str | None = None
    """Folder for cache = "file", with one file per split and host; ``PATH/.stretto-cache`` when not
    set. Files for other settings or other images are deleted, unless a run uses them.
    """
    max_pixels: int = Field(default=100_000_000, ge=1)
    """Largest width times height; a larger image counts as a bad sample and is not decoded."""
    max_corrupt_files: float = Field(default=0.1, ge=0, le=1)
    """Largest fraction of unreadable samples; with more of them the run ends with an error."""

    def form(self, *, train: bool) -> Form:
        """Return the form in which images are stored, for training or for evaluation."""
        default_side = -(-self.size * 8 // 7)
        if self.augment == "area_crop":
            whole_image = Form(self.store or -(-self.size * 12 // 7), is_whole=True)
            return whole_image if train else Form(default_side)
        return Form(self.store or (default_side if self.augment == "crop" else self.size))

    @property
    def max_decoders(self) -> int:
        """Largest number of decoders of a rank: one pool for training, one for evaluation."""
        return 2 * self.decoders_for_cores(MAX_DECODERS)

    def decoders_for_cores(self, cores: int) -> int:
        """Return the decoders per split of a rank that has ``cores`` to itself."""
        return self.decoders or min(max(cores, 1), MAX_DECODERS)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.store is not None and self.store < self.size:
            raise ValueError(
                f"store = {self.store} is less than size = {self.size}: "
                "what is kept must be at least as large as what the model sees"
            )
        if min(self.std) <= 0:
            raise ValueError(f"std = {list(self.std)}: expected three numbers above 0")
        return self

    @model_validator(mode="after")
    def _crops_can_be_drawn(self) -> Self:
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ValueError(
                f"area = {list(self.area)}: expected the least and the greatest share of an image, "
                "above 0 and at most 1"
            )
        if not 0 < self.aspect[0] <= self.aspect[1]:
            raise ValueError(
                f"aspect = {list(self.aspect)}: expected the least and the greatest width over "
                "height, above 0"
            )
        if self.augment != "area_crop":
            # Compare values: a resolved run file names every key, unused ones with their defaults.
            changed = {
                "area": self.area != AREA,
                "aspect": self.aspect != ASPECT,
                "plain_from_epoch": self.plain_from_epoch is not None,
            }
            if unused := [key for key, is_changed in changed.items() if is_changed]:
                raise ValueError(
                    f"{' and '.join(unused)} set for augment = {self.augment!r}, which does not "
                    'use it: leave it out, or set augment = "area_crop"'
                )
        return self
