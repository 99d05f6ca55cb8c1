"""A text file as samples: windows of bytes, each predicting its next byte; the end is held out."""

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from stretto.config import Config
from stretto.data.source import SelfContained
from stretto.errors import ConfigError

_PROBE_BYTES = 1 << 16
"""How much of either end of a file goes into its fingerprint: a large file is not read whole."""


class TextConfig(Config):
    """The ``[data]`` table of a run whose ``kind`` is ``"text"``."""

    kind: Literal["text"] = "text"
    path: str
    """The file; any bytes will do. A relative path counts from the working directory."""
    context: int = Field(default=64, ge=1)
    """Bytes a sample shows; there are as many next bytes to predict."""
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """Share of the file, at its end, that is kept for evaluation."""


class Text(SelfContained):
    """Sample ``i`` is the i-th window of ``context`` + 1 bytes; windows do not overlap."""

    def __init__(self, config: TextConfig, *, train: bool) -> None:
        path = Path(config.path).expanduser().resolve()
        window = config.context + 1
        num_bytes = _checked_size(path, config)
        num_windows = num_bytes // window
        # At least one window on either side, or there is nothing to train or to evaluate.
        held_out = min(max(round(num_windows * config.held_out), 1), num_windows - 1)
        trained = num_windows - held_out
        # Mapped, not read: ranks of one machine share the file's pages.
        file = np.memmap(path, dtype=np.uint8, mode="r", shape=(num_windows, window))
        self._windows = file[:trained] if train else file[trained:]
        self.num_samples = trained if train else held_out
        self.fingerprint = (
            f"text of {num_bytes} bytes, {_digest_of_ends(path)}, in windows of {window}, "
            f"{trained} to train on and {held_out} held out, {'train' if train else 'test'}"
        )

    def batch(self, indices: NDArray[np.int64], epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Return bytes [B, context] and the bytes that follow each, as int64, in any epoch."""
        windows = torch.from_numpy(self._windows[indices].astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _checked_size(path: Path, config: TextConfig) -> int:
    """Return the bytes in ``path``, or say what is wrong with it."""
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
