"""Image folders: list the files, decode them in helper processes, cache and augment the images."""

from stretto.data.images.config import ImagesConfig
from stretto.data.images.image_folder import ImageFolder

__all__ = ["ImageFolder", "ImagesConfig"]
