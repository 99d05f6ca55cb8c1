"""Image folders as samples: taken from the cache, or decoded; bad files left out and told."""

import hashlib
import os
import platform
import threading
from collections import ChainMap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.data.images.augment import Augment
from stretto.data.images.cache import Cache, Demand, open_in_folder, open_in_memory
from stretto.data.images.config import ImagesConfig
from stretto.data.images.folder import find_splits, stamp
from stretto.data.images.form import put
from stretto.data.images.pool import Failure, Pool
from stretto.data.source import Account, Place, Skipped
from stretto.errors import ConfigError


class Images:
    """The images of one split.

    Before `start` each batch is decoded by a process of its own, which is slow but enough for a
    trial; afterwards by processes that stay, with a cache that the ranks of the host share. Crops
    that are scaled (augment "area_crop") are then made by threads, as many as decoders.
    """

    def __init__(self, config: ImagesConfig, *, train: bool) -> None:
        self._pillow = _pillow_version()
        splits = find_splits(config.path)
        self._split = splits[0] if train else splits[1]
        self._stamps = stamp(self._split)
        self._fraction = len(self._split) / sum(len(split) for split in splits)
        self._config = config
        self._form = config.form(train=train)
        self._augment = Augment(config, train=train)
        self._pool: Pool | None = None
        self._hands: ThreadPoolExecutor | None = None
        self._cache: Cache | None = None
        self._bad: dict[int, str] = {}  # only what will not be better next time
        self._reading = threading.Lock()
        self._ledger = _Ledger()
        self.num_samples = len(self._split)
        self.bad_limit = config.bad_limit
        self.fills_cache = False
        self._epoch: int | None = None
        self.fingerprint = f"{self.num_samples} images, {self._stamps.content[:16]}"

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; a target is a place in here."""
        return self._split.classes

    def batch(self, indices: NDArray[np.int64], epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Return images [B, 3, size, size] in float32, normalised, and classes [B]."""
        labels = self._split.labels[indices]
        with self._reading:
            if epoch != self._epoch:
                self._epoch, self.fills_cache = epoch, False
            pixels, there = self._read(indices)
        if not there.all():
            pixels, indices, labels = pixels[there], indices[there], labels[there]
        each = self._hands.map if self._hands is not None else map
        inputs = self._augment(pixels, indices, epoch, each)
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def start(self, place: Place) -> None:
        """Start a decoder and open the cache; meets the other ranks once if it is in memory."""
        cores = len(os.sched_getaffinity(0)) // place.local_size
        self.close()
        limit = self._config.decoders_on(cores)
        self._pool = self._make_pool(limit)
        self._pool.prove()
        if self._form.is_whole and limit > 1:
            # Scaling takes a millisecond a crop and lets other threads run; a copy is not worth it.
            self._hands = ThreadPoolExecutor(limit, "stretto-crops")
        self._cache = self._open_cache(place)

    def close(self) -> None:
        """End the decoders and let go of the cache; `batch` then works as before `start`."""
        with self._reading:
            if self._pool is not None:
                self._pool.close()
            self._pool = self._cache = None
        if self._hands is not None:
            self._hands.shutdown()
            self._hands = None

    def take_account(self) -> Account:
        """Return what was decoded, found and skipped since the last call."""
        return self._ledger.take()

    def _read(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Return what is stored of each sample, and which of them are there."""
        pixels = np.empty((len(indices), *self._form.shape), dtype=np.uint8)
        there = np.zeros(len(indices), dtype=np.bool_)
        if self._cache is not None:
            there = self._cache.read(indices, pixels)
        num_cached = int(there.sum())
        missing = [p for p in np.flatnonzero(~there) if int(indices[p]) not in self._bad]
        decoded = self._decode([self._split.path(int(indices[p])) for p in missing])
        passing: dict[int, str] = {}
        for place, content in zip(missing, decoded, strict=True):
            index = int(indices[place])
            if isinstance(content, Failure):
                (self._bad if content.is_lasting else passing)[index] = content.reason
                continue
            put(pixels[place], content)
            there[place] = True
            if self._cache is not None:
                self._cache.write(index, pixels[place])
                self.fills_cache = True
        reasons = ChainMap(self._bad, passing)
        skipped = [Skipped(self._split.title(i), reasons[i]) for i in indices[~there].tolist()]
        self._ledger.add(int(there.sum()) - num_cached, num_cached, skipped)
        return pixels, there

    def _decode(self, paths: Sequence[bytes]) -> list[bytes | Failure]:
        if not paths:
            return []
        if self._pool is not None:
            return self._pool.decode(paths)
        pool = self._make_pool(1)
        try:
            return pool.decode(paths)
        finally:
            pool.close()

    def _make_pool(self, limit: int) -> Pool:
        return Pool(limit, form=self._form, max_pixels=self._config.max_pixels)

    def _open_cache(self, place: Place) -> Cache | None:
        config, split = self._config, self._split.folder
        demand = Demand(self._form.shape, self.num_samples, self._fraction, config.cache_size)
        if config.cache == "memory":
            return open_in_memory(f"{_short(place.key)}-{split.name}", demand, place.meet)
        if config.cache == "file":
            chosen = config.cache_folder or str(split.parent / ".stretto-cache")
            prefix = f"{split.name}-{_short(str(split))}-{_short(platform.node())}"
            decoded = (self._stamps.version, self._form, config.max_pixels, self._pillow)
            return open_in_folder(Path(chosen).expanduser(), prefix, _short(str(decoded)), demand)
        return None


class _Ledger:
    """An account that one thread writes and another takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._account = Account()

    def add(self, decoded: int, cached: int, skipped: Sequence[Skipped]) -> None:
        with self._lock:
            so_far = self._account
            self._account = Account(
                so_far.decoded + decoded, so_far.cached + cached, (*so_far.skipped, *skipped)
            )

    def take(self) -> Account:
        with self._lock:
            taken, self._account = self._account, Account()
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


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
