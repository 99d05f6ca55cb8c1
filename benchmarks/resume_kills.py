"""Kill a whole job at a random step, resume it, and compare with an undisturbed run.

    python -m benchmarks.resume_kills --count 20 --seed 7

Prints a JSON object per trial, then the count; the exit status is 1 if a trial failed.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.trials import run_campaign
from stretto.checkpoint import load_checkpoint
from stretto.telemetry.events import StepDone
from stretto.telemetry.sinks import read_events

STEPS = 40
RUN = f"""
[run]
threads = 1
trace = false
[model]
kind = "gpt"
blocks = 2
width = 32
context = 16
dropout = 0.1
[data]
kind = "text"
path = "TEXT"
context = 16
[optim]
kind = "adamw"
warmup_steps = 5
decay = "cosine"
[train]
batch = 24
steps = {STEPS}
accumulation = 2
log_every = 1
save_every = 3
"""
"""Uses everything a checkpoint must restore: Adam's moments, dropout, a varying rate, the order."""

DEADLINE_S = 120


@dataclass(frozen=True, slots=True)
class Trial:
    """One kill and the result of the resumed run."""

    seed: int
    wanted_step: int
    killed_after_step: int
    resumed_at_step: int
    equal: bool

    @property
    def passed(self) -> bool:
        """Whether the resumed run ended with the bits of the undisturbed one."""
        return self.equal


def campaign(count: int, seed: int) -> Iterator[Trial]:
    """Yield ``count`` trials; the undisturbed run is made once."""
    with tempfile.TemporaryDirectory(prefix="stretto-kills-") as name:
        folder = Path(name)
        run_file = write_run(folder)
        subprocess.run(command(run_file, folder, "calm"), check=True, capture_output=True)
        for index in range(count):
            yield one_trial(run_file, folder, seed + index)


def write_run(folder: Path) -> Path:
    """Write the run file and a training text."""
    text = folder / "text.txt"
    text.write_text("".join(f"{n} bottles stand on wall {n * n % 97}\n" for n in range(2000)))
    run_file = folder / "run.toml"
    run_file.write_text(RUN.replace("TEXT", str(text)))
    return run_file


def command(run_file: Path, folder: Path, name: str, *more: str) -> list[str]:
    """Return the command that trains as two workers in ``folder/name``."""
    settings = [f"run.folder={folder}", f"run.name={name}"]
    train = [sys.executable, "-m", "stretto", "train", str(run_file)]
    return [*train, *settings, "--workers", "2", *more]


def one_trial(run_file: Path, folder: Path, seed: int) -> Trial:
    """Kill at a random step, resume, compare the last checkpoints bit by bit."""
    name = f"killed-{seed}"
    target_step = random.Random(seed).randrange(1, STEPS - 1)
    killed_after = kill_after_step(command(run_file, folder, name), folder / name, target_step)
    resumed = subprocess.run(
        command(run_file, folder, name, "--resume"), capture_output=True, text=True, check=False
    )
    if resumed.returncode:
        raise SystemExit(f"seed {seed}: the resumed run failed:\n{resumed.stderr}")
    starts = [e for e in read_events(folder / name / "events.jsonl") if hasattr(e, "workers")]
    note = starts[-1].note.split()
    return Trial(
        seed=seed,
        wanted_step=target_step,
        killed_after_step=killed_after,
        resumed_at_step=int(note[-1]) if note else 0,
        equal=same_weights(folder / "calm", folder / name),
    )


def kill_after_step(argv: list[str], run_dir: Path, target_step: int) -> int:
    """Start, wait until ``target_step`` is logged, kill all; return the last step."""
    job = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    ranks: list[int] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while last_step(run_dir) < target_step and job.poll() is None:
        ranks = children(job.pid) or ranks
        time.sleep(0.01)
        if time.monotonic() > deadline_s:
            os.killpg(job.pid, signal.SIGKILL)
            raise SystemExit(f"no step {target_step} within {DEADLINE_S} s in {run_dir}")
    for pid in [job.pid, *ranks]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    job.wait()
    return last_step(run_dir)


def last_step(run_dir: Path) -> int:
    """Return the last step in the run's events, -1 before the first."""
    path = run_dir / "events.jsonl"
    events = read_events(path) if path.exists() else []
    return max((e.step for e in events if isinstance(e, StepDone)), default=-1)


def children(pid: int) -> list[int]:
    """Return the child processes of ``pid``."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(word) for word in text.split()]


def same_weights(one: Path, other: Path) -> bool:
    """Return whether the last checkpoints have the same bits, optimizer state included."""
    states = [load_checkpoint(run / "checkpoints" / f"step-{STEPS:08d}") for run in (one, other)]
    first, second = (state.tensors for state in states)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


if __name__ == "__main__":
    sys.exit(run_campaign(campaign, __doc__))
