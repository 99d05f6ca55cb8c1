"""The settings of image folders."""

from typing import Literal, Self

from pydantic import Field, model_validator

from stretto.config import Config
from stretto.data.images.form import Form
from stretto.units import Bytes

MOST_DECODERS = 8
"""Of one rank and split, unless asked for: more would be idle, or in the way of other ranks."""


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
    """Height and width in pixels of what the model sees."""
    store: int | None = Field(default=None, ge=8)
    """Side of the square that is decoded and cached per image, before augmentation; 8/7 of size
    for augment "crop" (256 for 224) and size for the others when not set. For "area_crop" the whole
    image is kept, shrunk to as many pixels as this square has, 12/7 of size (384 for 224) when not
    set: less makes small crops blurred, more takes more of the cache."""
    augment: Augmentation = "crop"
    """What training does to a sample, anew each epoch. "flip": mirrored or not; "crop": a random
    square of the stored one, and flip; "pad_crop": the same after reflecting size/8 pixels
    outwards at each edge, as is usual for CIFAR; "area_crop": a rectangle of random area and aspect
    of the whole image, scaled to size by size, and flip, as is usual for ImageNet. Evaluation takes
    the centre, always; after "area_crop" that of the image scaled to 8/7 of size on its shorter
    side."""
    area: tuple[float, float] = AREA
    """Least and greatest share of the image that "area_crop" cuts out."""
    aspect: tuple[float, float] = ASPECT
    """Least and greatest width over height of what "area_crop" cuts out, before scaling."""
    plain_from_epoch: int | None = Field(default=None, ge=0)
    """From this pass over the training data on, the first being 0, "area_crop" cuts out nearly
    whole images: an area of .999 to 1 of aspect 1 or, where that does not fit, the largest square
    at the centre; never when not set."""
    seed: int = 0
    """Another seed draws other crops and flips."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Red, green and blue that become 0, as shares of full brightness; ImageNet's by default."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """What red, green and blue are divided by afterwards; ImageNet's by default."""
    decoders: int | None = Field(default=None, ge=1, le=64)
    """Decoder processes per rank, for training and again for evaluation; this rank's share of the
    host's cores when not set, 8 at most."""
    cache: Literal["none", "memory", "file"] = "memory"
    """Where decoded images are kept for later epochs, once for all ranks of a host. "memory" ends
    with the run; "file" stays in cache_folder for the next one."""
    cache_size: Bytes | None = Field(default=None, ge=1)
    """Most that the cached images of one host may take, training and evaluation together; 2GB,
    or half of what is free if that is less, when not set. Samples beyond it are decoded anew."""
    cache_folder: str | None = None
    """Where cache = "file" keeps its files, one per split and host; ``PATH/.stretto-cache`` when
    not set. A file for other settings or other images is deleted, unless a run uses it."""
    max_pixels: int = Field(default=100_000_000, ge=1)
    """Width times height above which a file counts as bad; its pixels are not decoded."""
    bad_limit: float = Field(default=0.1, ge=0, le=1)
    """Largest share of bad samples with which the run goes on."""

    def form(self, *, train: bool) -> Form:
        """Return what is kept of each image, for training or for evaluation."""
        usual = -(-self.size * 8 // 7)
        if self.augment == "area_crop":
            whole = Form(self.store or -(-self.size * 12 // 7), is_whole=True)
            return whole if train else Form(usual)
        return Form(self.store or (usual if self.augment == "crop" else self.size))

    @property
    def most_decoders(self) -> int:
        """Decoders that a rank has at most: a pool for training, and one for evaluation."""
        return 2 * self.decoders_on(MOST_DECODERS)

    def decoders_on(self, cores: int) -> int:
        """Return how many decoders a rank with ``cores`` to itself may have for one split."""
        return self.decoders or min(max(cores, 1), MOST_DECODERS)

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
            # By value: a resolved run file names every key, those of others with their defaults.
            changed = {
                "area": self.area != AREA,
                "aspect": self.aspect != ASPECT,
                "plain_from_epoch": self.plain_from_epoch is not None,
            }
            if foreign := [key for key, is_changed in changed.items() if is_changed]:
                raise ValueError(
                    f"{' and '.join(foreign)} set for augment = {self.augment!r}, which does not "
                    'use it: leave it out, or set augment = "area_crop"'
                )
        return self
