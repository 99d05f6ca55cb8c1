"""Train ResNet-18 on CIFAR-10 JPEGs, and check data waits, the cache and corrupt files.

    python -m benchmarks.images [--archive cifar10-jpeg.tar.xz]

Needs an archive of JPEGs in ImageNet's layout (``train/CLASS/*.jpg``, ``test/...``); without one it
says so and ends with 0. Two workers train two epochs on 2,560 images, 50 of them corrupt.
Prints a JSON object; the exit status is 1 if a bound is broken.
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
"""Largest fraction of a step spent waiting for data after the first steps."""
WARM_STEPS = 10
PER_CLASS = 256
CORRUPT = 50


def main() -> int:
    """Run the cases; print one JSON object each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--archive", type=Path, default=ARCHIVE)
    args = parser.parse_args()
    if not args.archive.exists():
        print(f"skipped: no archive of images at {args.archive}", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory(prefix="stretto-images-") as folder:
        whole = Path(folder) / "whole"
        with tarfile.open(args.archive) as archive:
            archive.extractall(whole, filter="data")
        result = with_corrupt_files(whole, Path(folder))
    print(json.dumps(result), flush=True)
    return 0 if result["passed"] else 1


def with_corrupt_files(whole: Path, folder: Path) -> dict[str, object]:
    """Train on some of the images, a few of them corrupt; compare these with the reported files."""
    images = folder / "small"
    copy_some(whole, images)
    spoilt = corrupt_some(images / "train", seed=5)
    result = measure(images, folder)
    named = {line.partition(":")[0] for line in result.pop("files")}
    result["corrupt_planted"], result["corrupt_named"] = len(spoilt), len(named)
    result["passed"] = bool(result["passed"]) and named == spoilt
    return result


def measure(images: Path, folder: Path) -> dict[str, object]:
    """Train as two workers; return waiting times, and decoded and cached images by epoch."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "stretto", "train", str(root / "examples/images.toml")]
    settings = [f"run.folder={folder}", f"data.path={images}", "run.trace=false"]
    settings.append("data.max_corrupt_files=0.1")
    lengths = ["train.epochs=2", "train.log_every=5", "--workers", "2"]
    subprocess.run([*command, *settings, *lengths], check=True)
    events = read_events(folder / "images" / "events.jsonl")
    reads = [event for event in events if isinstance(event, DataRead)]
    done = [event for event in events if isinstance(event, StepDone) and event.step > WARM_STEPS]
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
    """Corrupt files, in four ways in turn; return their names as events report them."""
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
    """Write an image whose header claims 60,000 by 60,000 pixels."""
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
