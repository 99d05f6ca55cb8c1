"""What is in an image folder: classes and files, in an order that every machine agrees on."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stretto.errors import ConfigError

EXTENSIONS = (b".bmp", b".jpeg", b".jpg", b".png", b".webp")
"""How the name of an image ends, in any case; what is in the file is the decoder's business."""

TEST_FOLDERS = ("test", "val")
"""Where the evaluation images may be; the first that has classes is taken."""


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The images below one folder, by class and then by name.

    Names lie in one string of bytes, not in a list: a million of them would otherwise take a
    hundred megabytes on every rank.
    """

    folder: Path
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    names: bytes
    ends: NDArray[np.int64]
    """Where in ``names`` each name stops; it is relative to ``folder``."""

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> bytes:
        """Return the path of sample ``index`` relative to the split's folder."""
        start = self.ends[index - 1] if index else 0
        return self.names[start : self.ends[index]]

    def path(self, index: int) -> bytes:
        """Return the absolute path of sample ``index``."""
        return os.fsencode(self.folder) + b"/" + self.name(index)

    def title(self, index: int) -> str:
        """Return how messages call sample ``index``: its path below the data folder."""
        return f"{self.folder.name}/{self.name(index).decode(errors='backslashreplace')}"


@dataclass(frozen=True, slots=True)
class Stamps:
    """Digests that tell two lists of images apart."""

    content: str
    """From classes, names and sizes: the same wherever a copy of the images lies."""
    version: str
    """From ``content`` and the times of change: a file that was replaced in place is noticed."""


def find_splits(path: str) -> tuple[Split, Split]:
    """Return the training and the evaluation images below ``path``.

    Raises:
        ConfigError: A folder is missing or empty, or the splits have different classes.
    """
    root = Path(path).expanduser().resolve()
    if not root.is_dir():
        raise ConfigError(
            f"data.path = {path!r}: no such folder at {root}; "
            "give a folder with train/CLASS/*.jpg and test/CLASS/*.jpg"
        )
    train = _list_split(path, root / "train")
    found = [name for name in TEST_FOLDERS if _class_folders(root / name)]
    if not found:
        raise ConfigError(
            f"data.path = {path!r}: {root} has a train folder, but neither test nor val has "
            "folders of classes in it; put the images for evaluation there"
        )
    test = _list_split(path, root / found[0])
    _check_same_classes(path, train, test)
    return train, test


def stamp(split: Split) -> Stamps:
    """Return the digests of ``split``; asks the file system about every file."""
    digest = hashlib.sha256("\0".join(split.classes).encode(errors="surrogateescape"))
    facts = np.array([_facts(split.path(i)) for i in range(len(split))], np.int64).reshape(-1, 2)
    for part in (split.labels, split.ends, facts[:, 0]):
        digest.update(part.astype("<i8").tobytes())
    digest.update(split.names)
    content = digest.hexdigest()
    digest.update(facts[:, 1].astype("<i8").tobytes())
    return Stamps(content, digest.hexdigest())


def _facts(path: bytes) -> tuple[int, int]:
    """Return size and time of change; zeros for a file that is gone, which the decoder reports."""
    try:
        found = os.stat(path)  # noqa: PTH116 - a name may be any bytes
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _list_split(path: str, folder: Path) -> Split:
    classes = _class_folders(folder)
    if not classes:
        raise ConfigError(
            f"data.path = {path!r}: {folder} has no folders of classes in it; "
            f"expected {folder.name}/CLASS/*.jpg, one folder for each class"
        )
    labels: list[int] = []
    names, ends = bytearray(), []
    for label, name in enumerate(classes):
        for file in sorted(_images(os.fsencode(folder) + b"/" + name)):
            names += name + b"/" + file
            ends.append(len(names))
            labels.append(label)
    if not labels:
        endings = ", ".join(sorted(ending.decode() for ending in EXTENSIONS))
        raise ConfigError(
            f"data.path = {path!r}: no image in the {len(classes)} class folders of {folder}; "
            f"names must end in one of {endings}"
        )
    as_text = tuple(os.fsdecode(name) for name in classes)
    return Split(folder, as_text, np.array(labels), bytes(names), np.array(ends))


def _class_folders(folder: Path) -> list[bytes]:
    """Return the names of the folders in ``folder``, in order of their bytes, hidden ones not."""
    if not folder.is_dir():
        return []
    with os.scandir(os.fsencode(folder)) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith(b"."))


def _images(folder: bytes) -> Iterator[bytes]:
    with os.scandir(folder) as entries:
        for entry in entries:
            is_image = entry.name.lower().endswith(EXTENSIONS) and entry.name[:1] != b"."
            # A link to nowhere is a bad sample. A pipe or a device of that name is none at all:
            # opening one might never return.
            if is_image and (entry.is_file() or not Path(os.fsdecode(entry.path)).exists()):
                yield entry.name


def _check_same_classes(path: str, train: Split, test: Split) -> None:
    only_train = sorted(set(train.classes) - set(test.classes))
    only_test = sorted(set(test.classes) - set(train.classes))
    if only_train or only_test:
        parts = [
            f"only in {split.folder.name}: {', '.join(names[:5])}{' ...' * (len(names) > 5)}"
            for split, names in ((train, only_train), (test, only_test))
            if names
        ]
        raise ConfigError(
            f"data.path = {path!r}: train and {test.folder.name} have different classes; "
            f"{'; '.join(parts)}; give both the same class folders"
        )
