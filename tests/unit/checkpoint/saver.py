"""States to save, and child processes that are killed while saving them."""

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from stretto.checkpoint import CheckpointState, save_checkpoint

REMOVALS = ("os.remove", "os.rmdir")
FOLDER_EVENTS = ("open", "os.mkdir", "os.rename")
"""Audit events that Python raises before these operations; each can be the last one."""


def state_at(step: int, num_elements: int = 64) -> CheckpointState:
    """Return a small state whose bits identify its step."""
    values = torch.arange(num_elements, dtype=torch.float32)
    tensors = {"model/w": values + step, "optimizer/state/w/step": torch.tensor(float(step))}
    return CheckpointState(step=step, tensors=tensors, facts={"seed": 7, "position": [step, 0]})


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Return a value that is equal for two tensors only if they are bitwise equal, NaN included."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def assert_same(found: CheckpointState | None, expected: CheckpointState) -> None:
    assert found is not None
    assert found.step == expected.step
    assert list(found.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert bits(found.tensors[name]) == bits(tensor), name
    assert found.facts == expected.facts


def save_over_and_over(folder: Path, step: int, committed: Connection) -> None:
    """Save increasing steps from ``step`` on, each twice; send each saved step, until killed."""
    while True:
        for _ in range(2):
            save_checkpoint(folder, state_at(step, num_elements=200_000), generation=0)
            committed.send(step)
        step += 1


def redo_and_go_on(folder: Path, strike: int) -> None:
    """Replace step 2 and add step 3, but die just before folder event number ``strike``."""
    sys.addaudithook(_killer(folder, strike))
    save_checkpoint(folder, state_at(2), generation=0)
    save_checkpoint(folder, state_at(3), generation=0)


def _killer(folder: Path, strike: int) -> Callable[[str, tuple[object, ...]], None]:
    seen = 0

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        # A tree is removed by names relative to an open folder, so every removal counts.
        if event in REMOVALS or (event in FOLDER_EVENTS and str(folder) in str(args[0])):
            if seen == strike:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    return hook
