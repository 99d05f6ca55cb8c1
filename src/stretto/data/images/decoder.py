"""Decode images for another process: paths in, pixels out. Started as a script.

It imports only the standard library and Pillow, not stretto, so that it starts in a tenth of a
second. It communicates over standard input and output. A request is a length and a path. A reply is
a status, a length, and either pixels (rows of red, green, blue) or text. The pixels of a whole
image follow its width and height. The first reply is READY; replies then come in the order of
requests. The process ends when its input or its parent ends.
"""

import ctypes
import os
import signal
import struct
import sys
import warnings
from pathlib import Path
from typing import BinaryIO

REQUEST = struct.Struct("<I")
"""Length of the path that follows."""
REPLY = struct.Struct("<BI")
"""Status, and length of the content that follows."""
EXTENT = struct.Struct("<II")
"""Width and height, before the pixels of a whole image."""
READY, PIXELS, BAD, UNREADABLE = range(4)

IGNORED_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Slurm sends signals to every process of a job; only the rank itself reacts to them."""

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
"""Formats to try, whatever the extension says. Some of Pillow's others are unsafe: for PostScript
it would start an interpreter.
"""

_PR_SET_PDEATHSIG = 1


class NoPixelsError(Exception):
    """A file cannot be decoded; the message is the reason, in one line."""

    status: int


class BadImageError(NoPixelsError):
    """The file is not a supported image; trying again would not help."""

    status = BAD


class UnreadableImageError(NoPixelsError):
    """The system failed to read or decode the file; it may be good and may be read next time."""

    status = UNREADABLE


def decode(path: bytes, side: int, max_pixels: int, *, whole_image: bool = False) -> bytes:
    """Return the centre square of the image at ``path``, scaled to ``side`` x ``side`` pixels.

    With ``whole_image`` the image is instead shrunk to at most side x side pixels, and the pixels
    follow its `EXTENT`.

    Raises:
        BadImageError: The bytes of the file are not a supported image.
        UnreadableImageError: The file could not be read or decoded this time.
    """
    try:
        return _decode(path, side, max_pixels, whole_image=whole_image)
    except BadImageError:
        raise
    except Exception as error:
        if _lacks_memory(error):
            raise UnreadableImageError("not enough memory to decode it") from error
        if isinstance(error, OSError) and error.errno is not None:  # Pillow's have none
            raise UnreadableImageError(f"cannot be read: {error.strerror}") from error
        raise BadImageError(_reason(error)) from error


def _decode(path: bytes, side: int, max_pixels: int, *, whole_image: bool) -> bytes:
    from PIL import Image

    with Path(os.fsdecode(path)).open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise BadImageError("empty file")
        image = Image.open(file, formats=FORMATS)
        width, height = image.size
        if width * height > max_pixels:
            raise BadImageError(
                f"{width} x {height} pixels are more than data.max_pixels = {max_pixels}"
            )
        # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size, several times as fast. We keep at
        # least twice the target size, so that the final resize still averages pixels.
        target_size = shrunk_size(width, height, side**2) if whole_image else (side, side)
        image.draft("RGB", (2 * target_size[0], 2 * target_size[1]))
        colours = image.convert("RGB")
    if whole_image:
        scaled = colours.resize(target_size, Image.Resampling.BILINEAR)
        return EXTENT.pack(*target_size) + scaled.tobytes()
    width, height = colours.size
    edge = min(width, height)
    left, top = (width - edge) / 2, (height - edge) / 2
    box = (left, top, left + edge, top + edge)
    return colours.resize((side, side), Image.Resampling.BILINEAR, box=box).tobytes()


def shrunk_size(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """Return the size of the image after shrinking it, in its proportions, to ``max_pixels``."""
    shrink = min(1.0, (max_pixels / (width * height)) ** 0.5)
    short = max(1, int(min(width, height) * shrink))
    long = min(int(max(width, height) * shrink), max_pixels // short)
    return (long, short) if width > height else (short, long)


def _lacks_memory(error: Exception) -> bool:
    # Pillow reports a failed allocation of a codec as an OSError, like a broken file.
    is_codecs = isinstance(error, OSError) and str(error).startswith("out of memory")
    return is_codecs or isinstance(error, MemoryError)


def _reason(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return f"not an image ({', '.join(FORMATS)})"
    kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())


def serve(
    requests: BinaryIO, replies: BinaryIO, side: int, max_pixels: int, *, whole_image: bool = False
) -> None:
    """Answer requests until the input ends."""
    while len(header := requests.read(REQUEST.size)) == REQUEST.size:
        path = requests.read(*REQUEST.unpack(header))
        try:
            reply(replies, PIXELS, decode(path, side, max_pixels, whole_image=whole_image))
        except NoPixelsError as failure:
            reply(replies, failure.status, str(failure).encode(errors="backslashreplace"))


def reply(replies: BinaryIO, status: int, content: bytes) -> None:
    """Write one complete reply."""
    replies.write(REPLY.pack(status, len(content)) + content)
    replies.flush()


def main(side: int, whole_image: int, max_pixels: int, parent: int) -> int:
    """Serve on standard input and output until the input or ``parent`` ends."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _exit_with_parent(parent)
    # Redirect stdout to stderr: output printed by a codec must not mix with the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # about unusual metadata
    try:
        from PIL import Image
    except ImportError as missing:
        reply(replies, BAD, str(missing).encode())
        return 1
    Image.MAX_IMAGE_PIXELS = None  # max_pixels is checked instead
    try:
        reply(replies, READY, b"")
        serve(sys.stdin.buffer, replies, side, max_pixels, whole_image=bool(whole_image))
    except BrokenPipeError:
        os._exit(1)  # the reader is gone; a normal exit would fail to flush stdout
    return 0


def _exit_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
