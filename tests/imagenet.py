"""Write a generated folder with the structure of ImageNet, for tests."""

from pathlib import Path

import numpy as np
from PIL import Image

_USUAL = (500, 375)
"""Width and height of most ImageNet photographs; some are portrait."""
_EVERY = 50
"""Every 50th file has that size. The others are small, so that 1000 files take seconds."""


def write_imagenet(
    folder: Path, classes: int = 1000, per_class: int = 1, val: int = 16, seed: int = 0
) -> Path:
    """Write ``train/WNID/WNID_N.JPEG`` and ``val/WNID/ILSVRC2012_val_N.JPEG`` below ``folder``.

    Each class has ``per_class`` training files. The ``val`` validation files in all are spread over
    the classes, so that some class folders are empty. The mean colour of an image encodes its
    class. Writing 1000 files of 1000 classes takes about 1.5 s.
    """
    draws = np.random.default_rng(seed)
    wnids = [f"n{1440764 + 7 * number:08}" for number in range(classes)]
    for split in ("train", "val"):
        for wnid in wnids:
            (folder / split / wnid).mkdir(parents=True)
    for number in range(classes * per_class):
        label, count = divmod(number, per_class)
        path = folder / "train" / wnids[label] / f"{wnids[label]}_{count}.JPEG"
        _photograph(label, number, draws).save(path, "JPEG", quality=85)
    for number in range(val):
        label = number * classes // val
        path = folder / "val" / wnids[label] / f"ILSVRC2012_val_{number + 1:08}.JPEG"
        _photograph(label, number, draws).save(path, "JPEG", quality=85)
    return folder


def _photograph(label: int, number: int, draws: np.random.Generator) -> Image.Image:
    """Return an image of coarse random blots whose mean colour encodes ``label``."""
    colour = np.array([label % 10, label // 10 % 10, label // 100 % 10]) * 20 + 40
    blots = draws.integers(-30, 31, (6, 8, 3))
    small = Image.fromarray((colour + blots - blots.mean(axis=(0, 1))).clip(0, 255).astype("u1"))
    width, height = (
        _USUAL if number % _EVERY == 0 else draws.integers((90, 70), (160, 120)).tolist()
    )
    upright = draws.random() < 0.3
    return small.resize((height, width) if upright else (width, height))
