import errno
import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stretto.data.images.decoder import (
    BAD,
    EXTENT,
    PIXELS,
    REPLY,
    REQUEST,
    UNREADABLE,
    BadImageError,
    UnreadableImageError,
    decode,
    serve,
    shrunk_size,
)
from tests.unit.data.images.pictures import CORRUPT, encoded, huge_png, jpeg, noise

MANY = 10**8


@pytest.fixture
def decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as in a decoder process

    def run(content: bytes, side: int = 16, max_pixels: int = MANY):
        path = tmp_path / "some.jpg"
        path.write_bytes(content)
        pixels = decode(os.fsencode(path), side, max_pixels)
        return np.frombuffer(pixels, np.uint8).reshape(side, side, 3)

    return run


def test_an_image_of_the_right_size_keeps_its_pixels(decoded):
    image = noise(16, 16)
    assert np.array_equal(decoded(encoded(image, "PNG")), np.asarray(image))


@pytest.mark.parametrize(("width", "height"), [(300, 100), (100, 300)])
def test_the_centre_square_is_taken(decoded, width, height):
    image = Image.new("RGB", (width, height), "black")
    image.paste(
        "white", ((width - 100) // 2, (height - 100) // 2, width // 2 + 50, height // 2 + 50)
    )
    pixels = decoded(encoded(image, "PNG"))
    assert pixels[1:-1, 1:-1].min() == 255
    assert pixels.min() > 200  # scaling looks a little over the edge, as it should


def test_a_large_jpeg_decoded_at_reduced_size_gives_nearly_the_same_pixels(decoded):
    gradient = Image.linear_gradient("L").resize((2000, 1500)).convert("RGB")
    content = encoded(gradient, "JPEG", quality=95)
    whole_image = gradient.resize((40, 40), box=(250, 0, 1750, 1500))
    difference = np.abs(decoded(content, side=40).astype(int) - np.asarray(whole_image, dtype=int))
    assert difference.max() <= 4


def test_a_large_jpeg_is_not_decoded_in_full(decoded, monkeypatch):
    sizes, resize = [], Image.Image.resize

    def record(image, *arguments, **options):
        sizes.append(image.size)
        return resize(image, *arguments, **options)

    content = encoded(Image.new("RGB", (2000, 1500)), "JPEG")
    monkeypatch.setattr(Image.Image, "resize", record)
    decoded(content, side=40)
    assert sizes == [(250, 188)]  # an eighth


@pytest.mark.parametrize(
    ("size", "most", "expected"),
    [
        ((500, 375), 384**2, (443, 332)),
        ((375, 500), 384**2, (332, 443)),
        ((120, 90), 384**2, (120, 90)),
        ((384, 384), 384**2, (384, 384)),
        ((10_000, 1), 100, (100, 1)),
        ((2, 10_000), 100, (1, 100)),
    ],
)
def test_a_whole_image_is_shrunk_in_its_proportions_and_never_enlarged(size, most, expected):
    assert shrunk_size(*size, most) == expected


def test_a_whole_image_that_is_small_enough_keeps_its_pixels(tmp_path):
    image = noise(17, 11)
    (tmp_path / "some.png").write_bytes(encoded(image, "PNG"))
    content = decode(os.fsencode(tmp_path / "some.png"), 16, MANY, whole_image=True)
    assert content == EXTENT.pack(17, 11) + np.asarray(image).tobytes()


def test_a_whole_image_that_is_too_large_is_not_cropped(tmp_path):
    gradient = Image.linear_gradient("L").resize((2000, 1000)).convert("RGB")
    (tmp_path / "some.jpg").write_bytes(encoded(gradient, "JPEG", quality=95))
    content = decode(os.fsencode(tmp_path / "some.jpg"), 40, MANY, whole_image=True)
    assert EXTENT.unpack_from(content) == (56, 28)
    pixels = np.frombuffer(content, np.uint8, offset=EXTENT.size).reshape(28, 56, 3)
    expected = np.asarray(gradient.resize((56, 28)), dtype=int)
    assert np.abs(pixels - expected).max() <= 4


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_every_mode_becomes_three_colours(decoded, mode):
    source = Image.new("I", (16, 16), 300) if mode == "I;16" else noise(16, 16)
    image = source.convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    assert decoded(encoded(image, kind)).shape == (16, 16, 3)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("truncated", "truncated"),
        ("empty", "empty file"),
        ("text", "not an image (JPEG"),
        ("huge", "60000 x 60000 pixels are more than data.max_pixels = 100000000"),
        ("header", ""),
    ],
)
def test_a_corrupt_file_is_bad_with_a_reason_of_one_line(decoded, kind, reason):
    with pytest.raises(BadImageError) as bad:
        decoded(CORRUPT[kind])
    assert reason in str(bad.value)
    assert str(bad.value).splitlines() == [str(bad.value)] != [""]


def test_the_limit_on_pixels_is_checked_by_the_header(decoded):
    with pytest.raises(BadImageError, match="60000 x 60000"):
        decoded(huge_png(), max_pixels=MANY)


def test_an_image_of_exactly_the_limit_is_good(decoded):
    decoded(jpeg(width=24, height=20), max_pixels=480)
    with pytest.raises(BadImageError, match="24 x 20"):
        decoded(jpeg(width=24, height=20), max_pixels=479)


def test_a_png_with_a_damaged_part_is_bad(decoded):
    content = bytearray(encoded(noise(32, 32), "PNG"))
    content[len(content) // 2] ^= 0xFF
    with pytest.raises(BadImageError):
        decoded(bytes(content))


def test_postscript_with_an_image_extension_is_not_interpreted(decoded):
    with pytest.raises(BadImageError, match="not an image"):
        decoded(encoded(noise(8, 8), "EPS"))


def test_a_file_that_cannot_be_opened_is_unreadable_not_bad(tmp_path):
    with pytest.raises(UnreadableImageError, match="cannot be read: No such file"):
        decode(os.fsencode(tmp_path / "gone.jpg"), 8, MANY)
    with pytest.raises(UnreadableImageError, match="cannot be read: Is a directory"):
        decode(os.fsencode(tmp_path), 8, MANY)


class Failing(io.BytesIO):
    """A file that fails after its first bytes, as on a file system that disappears."""

    def __init__(self, content, number):
        super().__init__(content)
        self._number = number

    def __enter__(self):
        return self

    def fileno(self):
        return 0

    def read(self, size=-1):
        if self.tell() >= 2000:
            raise OSError(self._number, os.strerror(self._number))
        return super().read(size)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_file_that_fails_during_reading_is_unreadable(tmp_path, monkeypatch, kind, number):
    content = encoded(noise(400, 400), kind)
    (path := tmp_path / "some.jpg").write_bytes(content)
    stat = path.stat()
    monkeypatch.setattr(Path, "open", lambda *_: Failing(content, number))
    monkeypatch.setattr(os, "fstat", lambda _: stat)
    with pytest.raises(UnreadableImageError, match=f"cannot be read: {os.strerror(number)}"):
        decode(os.fsencode(path), 8, MANY)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ESTALE])
def test_a_file_that_the_system_refuses_is_unreadable(monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UnreadableImageError, match=os.strerror(number)):
        decode(b"some.jpg", 8, MANY)


@pytest.mark.parametrize(
    "lack", [MemoryError(), OSError("out of memory when reading image file")], ids=["our", "codec"]
)
def test_an_image_that_does_not_fit_into_memory_is_unreadable(decoded, monkeypatch, lack):
    def convert(*_):
        raise lack

    monkeypatch.setattr(Image.Image, "convert", convert)
    with pytest.raises(UnreadableImageError, match="not enough memory"):
        decoded(jpeg())


def test_pillow_still_reports_lack_of_memory_with_the_known_text():
    assert Image.core.getcodecstatus(-9).startswith("out of memory")


def test_replies_distinguish_pixels_bad_and_unreadable_files(tmp_path):
    (tmp_path / "good.jpg").write_bytes(jpeg())
    (tmp_path / "bad.jpg").write_bytes(CORRUPT["truncated"])
    paths = [os.fsencode(tmp_path / name) for name in ("good.jpg", "bad.jpg", "gone.jpg")]
    replies = io.BytesIO()
    serve(io.BytesIO(b"".join(REQUEST.pack(len(p)) + p for p in paths)), replies, 8, MANY)
    replies.seek(0)
    statuses = []
    while header := replies.read(REPLY.size):
        status, length = REPLY.unpack(header)
        statuses.append(status)
        replies.read(length)
    assert statuses == [PIXELS, BAD, UNREADABLE]
