"""CIFAR-10 from JPEG folders, ResNet-18, two workers: waiting for data, the cache, bad files.

    python -m benchmarks.images [--archive cifar10-jpeg.tar.xz]

Needs an archive of JPEGs in ImageNet's layout (``train/CLASS/*.jpg``, ``test/...``); without it
this says so and ends with 0. Two epochs on 2,560 images, 50 corrupt ones among them; one JSON
object, exit status 1 if a bound is broken.
"""

import argparse
import json
import random
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from stretto.telemetry.events import DataRead, StepDone
from stretto.telemetry.sinks import read_events

ARCHIVE = Path(__file__).parents[2] / "shared" / "data" / "cifar10-jpeg.tar.xz"
MOST_WAIT = 0.02
"""Share of a step that may go into waiting for data once the first steps are over."""
WARM_STEPS = 10
PER_CLASS = 256
CORRUPT = 50


def main() -> int:
    """Run the cases; print a JSON object each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--archive", type=Path, default=ARCHIVE)
    args = parser.parse_args()
    if not args.archive.exists():
        print(f"skipped: no archive of images at {args.archive}", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory(prefix="stretto-images-") as place:
        whole = Path(place) / "whole"
        with tarfile.open(args.archive) as archive:
            archive.extractall(whole, filter="data")
        result = with_corrupt_files(whole, Path(place))
    print(json.dumps(result), flush=True)
    return 0 if result["passed"] else 1


def with_corrupt_files(whole: Path, place: Path) -> dict[str, object]:
    """Train on a part of the images, some of them spoilt; compare the list with what was named."""
    images = place / "small"
    copy_some(whole, images)
    spoilt = corrupt_some(images / "train", seed=5)
    result = measure(images, place)
    named = {line.partition(":")[0] for line in result.pop("files")}
    result["corrupt_planted"], result["corrupt_named"] = len(spoilt), len(named)
    result["passed"] = bool(result["passed"]) and named == spoilt
    return result


def measure(images: Path, place: Path) -> dict[str, object]:
    """Train as two workers; return what waiting and decoding came to, epoch by epoch."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "stretto", "train", str(root / "examples/images.toml")]
    chosen = [f"run.folder={place}", f"data.path={images}", "data.bad_limit=0.1", "run.trace=false"]
    lengths = ["train.epochs=2", "train.log_every=5", "--workers", "2"]
    subprocess.run([*command, *chosen, *lengths], check=True)
    told = read_events(place / "images" / "events.jsonl")
    reads = [event for event in told if isinstance(event, DataRead)]
    done = [event for event in told if isinstance(event, StepDone) and event.step > WARM_STEPS]
    waits = [event.data_share for event in done]
    return {
        "case": "resnet18",
        "step_s": sorted(event.step_s for event in done)[len(done) // 2],
        "wait_mean": sum(waits) / len(waits),
        "wait_worst": max(waits),
        "bound": MOST_WAIT,
        "decoded": [event.decoded for event in reads],
        "cached": [event.cached for event in reads],
        "skipped": [event.skipped for event in reads],
        "files": [file for event in reads for file in event.files],
        "passed": sum(waits) / len(waits) <= MOST_WAIT
        and not any(event.decoded for event in reads[1:]),
    }


def copy_some(whole: Path, images: Path) -> None:
    """Copy the first few images of each class."""
    for split, count in (("train", PER_CLASS), ("test", PER_CLASS // 8)):
        for folder in sorted((whole / split).iterdir()):
            target = images / split / folder.name
            target.mkdir(parents=True)
            for file in sorted(folder.iterdir())[:count]:
                shutil.copy(file, target)


def corrupt_some(train: Path, seed: int) -> set[str]:
    """Spoil files, in four ways in turn; return their names as the run will give them."""
    files = random.Random(seed).sample(sorted(train.rglob("*.jpg")), CORRUPT)
    for number, file in enumerate(files):
        SPOIL[number % len(SPOIL)](file)
    return {str(file.relative_to(train.parent)) for file in files}


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _write_text(file: Path) -> None:
    file.write_text("<html>404 Not Found</html>\n" * 20)


def _make_huge(file: Path) -> None:
    """Write a picture whose header claims 60,000 by 60,000 pixels."""
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 64)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


SPOIL: tuple[Callable[[Path], None], ...] = (_truncate, _empty, _write_text, _make_huge)


if __name__ == "__main__":
    sys.exit(main())
