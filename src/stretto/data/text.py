"""A text file as samples: windows of bytes for next-byte prediction; the end is held out."""

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from stretto.config import Config
from stretto.data.sample_source import StatelessSource
from stretto.errors import ConfigError

_PROBE_BYTES = 1 << 16
"""Bytes of either end of a file that enter its fingerprint; large files are not read whole."""


class TextConfig(Config):
    """The ``[data]`` table of a run whose ``kind`` is ``"text"``."""

    kind: Literal["text"] = "text"
    path: str
    """The file; any bytes will do. A relative path counts from the working directory."""
    context: int = Field(default=64, ge=1)
    """Number of bytes in a sample; the targets are as many next bytes."""
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """Fraction of the file, at its end, that is kept for evaluation."""


class Text(StatelessSource):
    """Sample ``i`` is the i-th window of ``context`` + 1 bytes; windows do not overlap."""

    def __init__(self, config: TextConfig, *, train: bool) -> None:
        path = Path(config.path).expanduser().resolve()
        window = config.context + 1
        num_bytes = _checked_size(path, config)
        num_windows = num_bytes // window
        # Training and evaluation get at least one window each.
        held_out = min(max(round(num_windows * config.held_out), 1), num_windows - 1)
        num_train = num_windows - held_out
        # Memory-mapped, so that the ranks of a host share the file's pages.
        file = np.memmap(path, dtype=np.uint8, mode="r", shape=(num_windows, window))
        self._windows = file[:num_train] if train else file[num_train:]
        self.num_samples = num_train if train else held_out
        self.fingerprint = (
            f"text of {num_bytes} bytes, {_digest_of_ends(path)}, in windows of {window}, "
            f"{num_train} to train on and {held_out} held out, {'train' if train else 'test'}"
        )

    def batch(self, indices: NDArray[np.int64], epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Return bytes [B, context] and the byte after each, as int64; the same in every epoch."""
        windows = torch.from_numpy(self._windows[indices].astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _checked_size(path: Path, config: TextConfig) -> int:
    """Return the size of ``path`` in bytes; raise `ConfigError` if it is missing or too short."""
    needed = 2 * (config.context + 1)
    if not path.is_file():
        raise ConfigError(
            f"data.path = {config.path!r}: no such file at {path}; "
            f"give a text file of at least {needed} bytes"
        )
    num_bytes = path.stat().st_size
    if num_bytes < needed:
        raise ConfigError(
            f"data.path = {config.path!r}: {path} has {num_bytes} bytes, but context "
            f"{config.context} needs at least {needed}, one window to train on and one to "
            "evaluate; give a longer file or lower data.context"
        )
    return num_bytes


def _digest_of_ends(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_PROBE_BYTES))
        file.seek(max(0, path.stat().st_size - _PROBE_BYTES))
        digest.update(file.read(_PROBE_BYTES))
    return digest.hexdigest()[:16]
