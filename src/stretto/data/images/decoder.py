"""Decode images for another process: paths in, pixels out. Started as a script.

It needs the standard library and Pillow, nothing of ours, so that it starts in a tenth of a second.
It speaks on its standard input and output: a request is a length and a path; a reply is a status,
a length, and either pixels (rows of red, green, blue) or text. Pixels are those of a square, or
come after their width and height. Replies come in the order of requests, after one that says READY.
It ends with its input or with its parent.
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
"""Status, and length of what follows."""
EXTENT = struct.Struct("<II")
"""Width and height, before the pixels of a whole image."""
READY, PIXELS, BAD, UNREAD = range(4)

IGNORED_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Slurm signals every process of a job; what to do about it is decided by the rank alone."""

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
"""What is tried, whatever the name of the file says. Not all that Pillow knows: it would start a
PostScript interpreter for a file that asks for one."""

_PR_SET_PDEATHSIG = 1


class NoPixelsError(Exception):
    """There are no pixels of a file; the message is the reason, in one line."""

    status: int


class BadImageError(NoPixelsError):
    """The bytes of the file are no image we take, and will not be one next time."""

    status = BAD


class UnreadImageError(NoPixelsError):
    """The system failed us; the file may be good, and may be read next time."""

    status = UNREAD


def decode(path: bytes, side: int, max_pixels: int, *, whole: bool = False) -> bytes:
    """Return the centre square of the image at ``path``, scaled to ``side`` by ``side`` pixels.

    The ``whole`` image instead is shrunk until it has no more pixels than that, and comes after
    its `EXTENT`.

    Raises:
        BadImageError: The bytes prove that there are no such pixels.
        UnreadImageError: They could not be read or decoded this time.
    """
    try:
        return _decode(path, side, max_pixels, whole=whole)
    except BadImageError:
        raise
    except Exception as wrong:
        if _lacks_memory(wrong):
            raise UnreadImageError("not enough memory to decode it") from wrong
        if isinstance(wrong, OSError) and wrong.errno is not None:  # Pillow's own have none
            raise UnreadImageError(f"cannot be read: {wrong.strerror}") from wrong
        raise BadImageError(_reason(wrong)) from wrong


def _decode(path: bytes, side: int, max_pixels: int, *, whole: bool) -> bytes:
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
        # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size, several times as fast. At least
        # twice the pixels we need stay, so that the rest of the scaling still averages.
        goal = fitted(width, height, side**2) if whole else (side, side)
        image.draft("RGB", (2 * goal[0], 2 * goal[1]))
        colours = image.convert("RGB")
    if whole:
        scaled = colours.resize(goal, Image.Resampling.BILINEAR)
        return EXTENT.pack(*goal) + scaled.tobytes()
    width, height = colours.size
    edge = min(width, height)
    left, top = (width - edge) / 2, (height - edge) / 2
    box = (left, top, left + edge, top + edge)
    return colours.resize((side, side), Image.Resampling.BILINEAR, box=box).tobytes()


def fitted(width: int, height: int, most: int) -> tuple[int, int]:
    """Return the size of an image shrunk, in its proportions, to at most ``most`` pixels."""
    shrink = min(1.0, (most / (width * height)) ** 0.5)
    short = max(1, int(min(width, height) * shrink))
    long = min(int(max(width, height) * shrink), most // short)
    return (long, short) if width > height else (short, long)


def _lacks_memory(wrong: Exception) -> bool:
    # What a codec of Pillow could not allocate comes as an OSError like that of a broken file.
    is_codecs = isinstance(wrong, OSError) and str(wrong).startswith("out of memory")
    return is_codecs or isinstance(wrong, MemoryError)


def _reason(wrong: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(wrong, UnidentifiedImageError):
        return f"not an image ({', '.join(FORMATS)})"
    kind = "" if isinstance(wrong, OSError) else f"{type(wrong).__name__}: "
    return " ".join(f"{kind}{wrong}".split())


def serve(
    requests: BinaryIO, replies: BinaryIO, side: int, max_pixels: int, *, whole: bool = False
) -> None:
    """Answer requests until they end."""
    while len(header := requests.read(REQUEST.size)) == REQUEST.size:
        path = requests.read(*REQUEST.unpack(header))
        try:
            reply(replies, PIXELS, decode(path, side, max_pixels, whole=whole))
        except NoPixelsError as why:
            reply(replies, why.status, str(why).encode(errors="backslashreplace"))


def reply(replies: BinaryIO, status: int, content: bytes) -> None:
    """Write one reply, whole."""
    replies.write(REPLY.pack(status, len(content)) + content)
    replies.flush()


def main(side: int, whole: int, max_pixels: int, parent: int) -> int:
    """Serve on standard input and output for as long as ``parent`` lives."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _die_with(parent)
    # What a codec prints must not get between our replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # of odd metadata: a file is good or it is bad
    try:
        from PIL import Image
    except ImportError as missing:
        reply(replies, BAD, str(missing).encode())
        return 1
    Image.MAX_IMAGE_PIXELS = None  # our own limit holds instead
    try:
        reply(replies, READY, b"")
        serve(sys.stdin.buffer, replies, side, max_pixels, whole=bool(whole))
    except BrokenPipeError:
        os._exit(1)  # nobody listens any more; a normal exit would flush and complain
    return 0


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above took effect
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
