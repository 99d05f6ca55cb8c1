"""Small image folders for tests: the colour of an image encodes its number."""

import os
import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from stretto.data import HostContext

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
"""Settings under which an input is its pixel divided by 255."""
RUN_KEY = f"run-{os.getpid()}"
"""Ranks of one host with equal keys share a cache; tests in another process have another key."""


def jpeg(number: int = 0, width: int = 24, height: int = 20) -> bytes:
    """Return an image of one colour; 256 numbers are distinguishable."""
    colour = (number % 16 * 16 + 8, number // 16 * 16 + 8, 128)
    return encoded(Image.new("RGB", (width, height), colour), "JPEG")


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def numbers(inputs) -> list[int]:
    """Return the numbers of the images in ``inputs``, decoded from the colour of each centre."""
    middle = inputs.shape[-1] // 2
    red, green = (inputs[:, c, middle, middle].mul(255 / 16).int() for c in (0, 1))
    return (red + 16 * green).tolist()


def huge_jpeg() -> bytes:
    """Return a JPEG whose header claims 60000 x 60000 pixels."""
    whole = bytearray(jpeg())
    frame = whole.index(b"\xff\xc0")
    whole[frame + 5 : frame + 9] = struct.pack(">HH", 60000, 60000)
    return bytes(whole)


def huge_png() -> bytes:
    header = struct.pack(">II", 60000, 60000) + bytes([8, 2, 0, 0, 0])
    whole = encoded(Image.new("RGB", (8, 8)), "PNG")
    chunk = b"IHDR" + header
    return whole[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + whole[33:]


CORRUPT = {
    "truncated": encoded(noise(64, 64), "JPEG")[:-700],
    "empty": b"",
    "text": b"this is not an image\n" * 20,
    "huge": huge_jpeg(),
    "header": jpeg()[:30],
}
"""Ways in which a file may be bad."""


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    """Write ``files`` by path relative to ``folder``."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def data_folder(root: Path, num_train: int = 12, num_test: int = 4) -> Path:
    """Make a data set of two classes; image i of a split has number i."""
    files = {
        f"{split}/{'ab'[2 * i // count]}/{i:03}.jpg": jpeg(i)
        for split, count in (("train", num_train), ("test", num_test))
        for i in range(count)
    }
    return fill(root, files)


def single_rank(key: str = RUN_KEY) -> HostContext:
    return HostContext(0, 1, key, barrier=lambda: None)
