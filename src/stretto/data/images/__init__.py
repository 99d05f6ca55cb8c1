"""Folders of image files: listed, decoded by helper processes, cached, augmented."""

from stretto.data.images.config import ImagesConfig
from stretto.data.images.source import Images

__all__ = ["Images", "ImagesConfig"]
