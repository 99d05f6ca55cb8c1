"""A small job of real ranks with decoder processes, for campaigns that break it."""

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

from stretto.launch.processes import guarded

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
"""A word in the environment of every process of a job, however deep: how they are found."""


def _mark(name: str) -> str:
    """Return the job's mark; another campaign beside this one may have a job of the same name."""
    return f"{name} of {os.getpid()}"


def write_job(folder: Path) -> Path:
    """Write the run file and a few images to learn; return the run file."""
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("a", "b"):
            place = folder / "images" / split / name
            place.mkdir(parents=True)
            for number in range(16):
                pixels = draw.integers(0, 255, (20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.jpg")
    run_file = folder / "run.toml"
    run_file.write_text(RUN.replace("IMAGES", str(folder / "images")))
    return run_file


def start(
    run_file: Path, name: str, log: Path, *more: str, path: str | None = None
) -> "subprocess.Popen[bytes]":
    """Start the job as four workers; everything it says goes to ``log``; ``path`` is its PATH.

    It is killed when this process dies: a campaign that is cut short leaves no job behind.
    """
    settings = [f"run.folder={run_file.parent / 'runs'}", f"run.name={name}", *more]
    command = [sys.executable, "-m", "stretto", "train", str(run_file), *settings]
    with log.open("wb") as output:
        return subprocess.Popen(
            guarded([*command, "--workers", "4"]),
            env={**os.environ, MARK: _mark(name)} | ({} if path is None else {"PATH": path}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def of_job(name: str) -> list[psutil.Process]:
    """Return the living processes that carry the job's mark."""
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
    """Return the seconds until ``happened``; end the campaign when it does not."""
    began_s = time.monotonic()
    while not happened():
        if time.monotonic() - began_s > timeout_s:
            raise SystemExit(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.02)
    return time.monotonic() - began_s


def await_steps(run_dir: Path, count: int) -> None:
    """Return once the job has logged so many steps."""
    events = run_dir / "events.jsonl"

    def done() -> bool:
        return events.exists() and events.read_text().count('"step_done"') >= count

    await_true(done, 120, f"{count} steps in {run_dir}")


def a_while(seed: int, longest_s: float) -> float:
    """Return a random time to wait, in seconds."""
    return random.Random(seed).uniform(0, longest_s)
