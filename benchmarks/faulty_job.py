"""A small job of real ranks with decoder processes, for campaigns that inject faults."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from stretto.launch.worker_group import with_parent_death_signal

RUN = """
[run]
threads = 1
trace = false
[data]
kind = "images"
path = "IMAGES"
size = 16
decoders = 1
[model]
kind = "cnn"
width = 8
classes = 2
[train]
batch = 8
steps = 1000000
log_every = 1
eval_every = 1000000
save_every = 1000000
"""
MARK = "STRETTO_CAMPAIGN_MARK"
"""Environment variable of every process of a job, inherited by children, to find them all."""


def _mark(name: str) -> str:
    """Return the job's mark; a campaign that runs at the same time may use the same job name."""
    return f"{name} of {os.getpid()}"


def write_job(folder: Path) -> Path:
    """Write the run file and a few training images; return the run file."""
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("a", "b"):
            class_folder = folder / "images" / split / name
            class_folder.mkdir(parents=True)
            for number in range(16):
                pixels = draw.integers(0, 255, (20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(class_folder / f"{number}.jpg")
    run_file = folder / "run.toml"
    run_file.write_text(RUN.replace("IMAGES", str(folder / "images")))
    return run_file


def start(
    run_file: Path, name: str, log: Path, *more: str, path: str | None = None
) -> "subprocess.Popen[bytes]":
    """Start the job as four workers; all its output goes to ``log``; ``path`` is its PATH.

    The kernel kills it when this process dies, so that an interrupted campaign leaves no job
    behind.
    """
    settings = [f"run.folder={run_file.parent / 'runs'}", f"run.name={name}", *more]
    command = [sys.executable, "-m", "stretto", "train", str(run_file), *settings]
    with log.open("wb") as output:
        return subprocess.Popen(
            with_parent_death_signal([*command, "--workers", "4"]),
            env={**os.environ, MARK: _mark(name)} | ({} if path is None else {"PATH": path}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def of_job(name: str) -> list[psutil.Process]:
    """Return the live processes with the job's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(MARK) == _mark(name)
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def await_true(happened: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Wait until ``happened()``; return the seconds, or end the campaign at the timeout."""
    began_s = time.monotonic()
    while not happened():
        if time.monotonic() - began_s > timeout_s:
            raise SystemExit(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.02)
    return time.monotonic() - began_s


def await_steps(run_dir: Path, count: int) -> None:
    """Wait until the job has logged ``count`` steps."""
    events = run_dir / "events.jsonl"

    def done() -> bool:
        return events.exists() and events.read_text().count('"step_done"') >= count

    await_true(done, 120, f"{count} steps in {run_dir}")


def a_while(seed: int, longest_s: float) -> float:
    """Return a random time up to ``longest_s``, in seconds."""
    return random.Random(seed).uniform(0, longest_s)
