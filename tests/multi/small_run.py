"""A run of a few seconds, for tests that start it in different ways and compare its weights."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from stretto.checkpoint import load_checkpoint

STEPS = 12
RUN = f"""
[run]
threads = 1
[data]
samples = 200
test_samples = 32
size = 16
[model]
width = 8
[optim]
lr = 0.02
[strategy]
bucket_bytes = "2KB"
algorithm = "native, ring from 1KB"
[train]
batch = 20
steps = {STEPS}
"""
STRETTO = (sys.executable, "-m", "stretto")

Tensors = Mapping[str, torch.Tensor]


def write_run(folder: Path) -> Path:
    """Write ``run.toml`` into the folder; return the folder."""
    (folder / "run.toml").write_text(RUN)
    return folder


def train(
    folder: Path,
    name: str,
    *more: str,
    start: Sequence[str] = STRETTO,
    environ: Mapping[str, str] | None = None,
) -> tuple[str, Tensors]:
    """Train with the prefix ``start``; return stderr and the tensors of the last checkpoint."""
    done = subprocess.run(
        [*start, "train", "run.toml", f"run.name={name}", *more],
        cwd=folder,
        env=os.environ if environ is None else environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr, last_tensors(folder, name)


def stretto(
    folder: Path, *arguments: str, limit_s: float = 120
) -> "subprocess.CompletedProcess[str]":
    """Run a stretto command in ``folder``; return its exit status and output."""
    return subprocess.run(
        [*STRETTO, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )


def last_tensors(folder: Path, name: str) -> Tensors:
    """Return the tensors of the run's final checkpoint."""
    return load_checkpoint(folder / "runs" / name / "checkpoints" / f"step-{STEPS:08}").tensors


def same(one: Tensors, other: Tensors) -> bool:
    """Return whether two states are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
