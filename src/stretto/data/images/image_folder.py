"""Image folders as a sample source: cached or decoded images, with unreadable files left out."""

import hashlib
import os
import platform
import threading
from collections import ChainMap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.data.images.augment import Augment
from stretto.data.images.cache import Cache, CacheSpec, open_folder_cache, open_memory_cache
from stretto.data.images.config import ImagesConfig, write_row
from stretto.data.images.decoder_pool import DecodeFailure, DecoderPool
from stretto.data.sample_source import HostContext, ReadStatistics, SkippedSample
from stretto.errors import ConfigError

EXTENSIONS = (b".bmp", b".jpeg", b".jpg", b".png", b".webp")
"""Extensions of image files, in lower case; the decoder finds the format from the content."""

TEST_FOLDERS = ("test", "val")
"""Names of the folder with evaluation images; the first that has class folders is used."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageSplit:
    """The images below one folder, sorted by class and then by name, equally on every machine.

    All names are stored in one byte string instead of a list: as objects, a million names would
    take a hundred megabytes on every rank.
    """

    folder: Path
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    names: bytes
    name_ends: NDArray[np.int64]
    """End of each name in ``names``; names are relative to ``folder``."""

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> bytes:
        """Return the path of sample ``index`` relative to the split's folder."""
        start = self.name_ends[index - 1] if index else 0
        return self.names[start : self.name_ends[index]]

    def path(self, index: int) -> bytes:
        """Return the absolute path of sample ``index``."""
        return os.fsencode(self.folder) + b"/" + self.name(index)

    def display_name(self, index: int) -> str:
        """Return the name of sample ``index`` in messages: its path below the data folder."""
        return f"{self.folder.name}/{self.name(index).decode(errors='backslashreplace')}"


@dataclass(frozen=True, slots=True)
class SplitDigests:
    """Two digests of a list of images."""

    content: str
    """Digest of classes, names and sizes: equal for every copy of the images."""
    version: str
    """Digest of ``content`` and modification times: changes when a file is replaced in host."""


def find_splits(path: str) -> tuple[ImageSplit, ImageSplit]:
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


def digest_split(split: ImageSplit) -> SplitDigests:
    """Return the digests of ``split``; calls `os.stat` for every file."""
    digest = hashlib.sha256("\0".join(split.classes).encode(errors="surrogateescape"))
    facts = np.array([_size_and_mtime(split.path(i)) for i in range(len(split))], np.int64).reshape(
        -1, 2
    )
    for part in (split.labels, split.name_ends, facts[:, 0]):
        digest.update(part.astype("<i8").tobytes())
    digest.update(split.names)
    content = digest.hexdigest()
    digest.update(facts[:, 1].astype("<i8").tobytes())
    return SplitDigests(content, digest.hexdigest())


def _size_and_mtime(path: bytes) -> tuple[int, int]:
    """Return size and modification time; zeros for a missing file, which the decoder reports."""
    try:
        found = os.stat(path)  # noqa: PTH116 - a name may be any bytes
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _list_split(path: str, folder: Path) -> ImageSplit:
    classes = _class_folders(folder)
    if not classes:
        raise ConfigError(
            f"data.path = {path!r}: {folder} has no folders of classes in it; "
            f"expected {folder.name}/CLASS/*.jpg, one folder for each class"
        )
    labels: list[int] = []
    names, name_ends = bytearray(), []
    for label, name in enumerate(classes):
        for file in sorted(_image_names(os.fsencode(folder) + b"/" + name)):
            names += name + b"/" + file
            name_ends.append(len(names))
            labels.append(label)
    if not labels:
        extensions = ", ".join(sorted(ending.decode() for ending in EXTENSIONS))
        raise ConfigError(
            f"data.path = {path!r}: no image in the {len(classes)} class folders of {folder}; "
            f"names must end in one of {extensions}"
        )
    as_text = tuple(os.fsdecode(name) for name in classes)
    return ImageSplit(folder, as_text, np.array(labels), bytes(names), np.array(name_ends))


def _class_folders(folder: Path) -> list[bytes]:
    """Return the names of the visible folders in ``folder``, sorted by their bytes."""
    if not folder.is_dir():
        return []
    with os.scandir(os.fsencode(folder)) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith(b"."))


def _image_names(folder: bytes) -> Iterator[bytes]:
    with os.scandir(folder) as entries:
        for entry in entries:
            is_image = entry.name.lower().endswith(EXTENSIONS) and entry.name[:1] != b"."
            # A dangling link counts as a bad sample. A pipe or a device is left out, because
            # opening one might never return.
            if is_image and (entry.is_file() or not Path(os.fsdecode(entry.path)).exists()):
                yield entry.name


def _check_same_classes(path: str, train: ImageSplit, test: ImageSplit) -> None:
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


class ImageFolder:
    """The images of one split, as a `SampleSource`.

    Before `start` each batch is decoded by a temporary process, which is slow but enough to try a
    model. After `start` there are permanent decoder processes and a cache that the ranks of the
    host share. Resized crops (augment "area_crop") are then made by threads, as many as there are
    decoders.
    """

    def __init__(self, config: ImagesConfig, *, train: bool) -> None:
        self._pillow = _pillow_version()
        splits = find_splits(config.path)
        self._split = splits[0] if train else splits[1]
        self._digests = digest_split(self._split)
        self._split_fraction = len(self._split) / sum(len(split) for split in splits)
        self._config = config
        self._form = config.form(train=train)
        self._augment = Augment(config, train=train)
        self._pool: DecoderPool | None = None
        self._crop_threads: ThreadPoolExecutor | None = None
        self._cache: Cache | None = None
        self._corrupt: dict[int, str] = {}  # permanent failures only
        self._read_lock = threading.Lock()
        self._statistics = _StatisticsCounter()
        self.num_samples = len(self._split)
        self.max_corrupt_files = config.max_corrupt_files
        self.fills_cache = False
        self._epoch: int | None = None
        self.fingerprint = f"{self.num_samples} images, {self._digests.content[:16]}"

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; a target is an index into these."""
        return self._split.classes

    def batch(self, indices: NDArray[np.int64], epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Return images [B, 3, size, size] in float32, normalised, and classes [B]."""
        labels = self._split.labels[indices]
        with self._read_lock:
            if epoch != self._epoch:
                self._epoch, self.fills_cache = epoch, False
            pixels, available = self._read(indices)
        if not available.all():
            pixels, indices, labels = pixels[available], indices[available], labels[available]
        map_function = self._crop_threads.map if self._crop_threads is not None else map
        inputs = self._augment(pixels, indices, epoch, map_function)
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def start(self, host: HostContext) -> None:
        """Start a decoder and open the cache; calls ``host.barrier`` once for a cache in memory."""
        cores = len(os.sched_getaffinity(0)) // host.local_size
        self.close()
        limit = self._config.decoders_for_cores(cores)
        self._pool = self._make_pool(limit)
        self._pool.check_startup()
        if self._form.is_whole and limit > 1:
            # A resize takes a millisecond and releases the GIL; a plain copy is too cheap.
            self._crop_threads = ThreadPoolExecutor(limit, "stretto-crops")
        self._cache = self._open_cache(host)

    def close(self) -> None:
        """End the decoders and close the cache; `batch` then works as before `start`."""
        with self._read_lock:
            if self._pool is not None:
                self._pool.close()
            self._pool = self._cache = None
        if self._crop_threads is not None:
            self._crop_threads.shutdown()
            self._crop_threads = None

    def take_statistics(self) -> ReadStatistics:
        """Return what was decoded, cached and skipped since the last call."""
        return self._statistics.take()

    def _read(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Return the stored form of each sample, and a mask of those that could be read."""
        pixels = np.empty((len(indices), *self._form.shape), dtype=np.uint8)
        available = np.zeros(len(indices), dtype=np.bool_)
        if self._cache is not None:
            available = self._cache.read(indices, pixels)
        num_cached = int(available.sum())
        missing = [p for p in np.flatnonzero(~available) if int(indices[p]) not in self._corrupt]
        decoded = self._decode([self._split.path(int(indices[p])) for p in missing])
        transient: dict[int, str] = {}
        for position, content in zip(missing, decoded, strict=True):
            index = int(indices[position])
            if isinstance(content, DecodeFailure):
                (self._corrupt if content.is_permanent else transient)[index] = content.reason
                continue
            write_row(pixels[position], content)
            available[position] = True
            if self._cache is not None:
                self._cache.write(index, pixels[position])
                self.fills_cache = True
        reasons = ChainMap(self._corrupt, transient)
        skipped = [
            SkippedSample(self._split.display_name(i), reasons[i])
            for i in indices[~available].tolist()
        ]
        self._statistics.add(int(available.sum()) - num_cached, num_cached, skipped)
        return pixels, available

    def _decode(self, paths: Sequence[bytes]) -> list[bytes | DecodeFailure]:
        if not paths:
            return []
        if self._pool is not None:
            return self._pool.decode(paths)
        pool = self._make_pool(1)
        try:
            return pool.decode(paths)
        finally:
            pool.close()

    def _make_pool(self, limit: int) -> DecoderPool:
        return DecoderPool(limit, form=self._form, max_pixels=self._config.max_pixels)

    def _open_cache(self, host: HostContext) -> Cache | None:
        config, split = self._config, self._split.folder
        spec = CacheSpec(
            self._form.shape, self.num_samples, self._split_fraction, config.cache_size
        )
        if config.cache == "memory":
            return open_memory_cache(f"{_short_digest(host.key)}-{split.name}", spec, host.barrier)
        if config.cache == "file":
            chosen = config.cache_folder or str(split.parent / ".stretto-cache")
            prefix = f"{split.name}-{_short_digest(str(split))}-{_short_digest(platform.node())}"
            decoded = (self._digests.version, self._form, config.max_pixels, self._pillow)
            return open_folder_cache(
                Path(chosen).expanduser(), prefix, _short_digest(str(decoded)), spec
            )
        return None


class _StatisticsCounter:
    """Read statistics that one thread adds to and another takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = ReadStatistics()

    def add(self, decoded: int, cached: int, skipped: Sequence[SkippedSample]) -> None:
        with self._lock:
            before = self._counts
            self._counts = ReadStatistics(
                before.decoded + decoded, before.cached + cached, (*before.skipped, *skipped)
            )

    def take(self) -> ReadStatistics:
        with self._lock:
            taken, self._counts = self._counts, ReadStatistics()
        return taken


def _pillow_version() -> str:
    try:
        import PIL
    except ImportError:
        raise ConfigError(
            "data.kind = 'images' needs pillow, which is not installed; "
            'pip install "stretto[vision]"'
        ) from None
    return PIL.__version__


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
