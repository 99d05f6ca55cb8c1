"""Kill the launcher of a job (-9) at a random moment, and check that all its processes end.

    python -m benchmarks.launcher_kills --count 20 --seed 7

The job has four ranks with a decoder process each. Prints a JSON object per trial, then the count;
the exit status is 1 if a trial failed.
"""

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faulty_job import a_while, await_steps, of_job, start, write_job
from benchmarks.trials import run_campaign

ALLOWED_S = 5.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One kill and the number of processes left."""

    seed: int
    waited_s: float
    processes_before: int
    alive_after_5_s: int
    gone_after_s: float | None

    @property
    def passed(self) -> bool:
        """Whether no process survived."""
        return self.alive_after_5_s == 0


def campaign(count: int, seed: int, path: str | None = None) -> Iterator[Trial]:
    """Yield ``count`` trials: every other kill is during the start, the rest during training."""
    with tempfile.TemporaryDirectory(prefix="stretto-kills-") as folder:
        run_file = write_job(Path(folder))
        for index in range(count):
            yield one_trial(run_file, seed + index, training=index % 2 == 1, path=path)


def one_trial(run_file: Path, seed: int, *, training: bool, path: str | None) -> Trial:
    """Kill at a random moment; count the processes that live after `ALLOWED_S`."""
    name = f"job-{seed}"
    job = start(run_file, name, run_file.parent / f"{name}.log", path=path)
    waited_s = a_while(seed, 1.0 if training else 8.0)
    if training:
        await_steps(run_file.parent / "runs" / name, 2)
    time.sleep(waited_s)
    before = len(of_job(name))
    job.send_signal(signal.SIGKILL)
    killed_s = time.monotonic()
    job.wait()
    gone_s = None
    while (left := of_job(name)) and time.monotonic() - killed_s < ALLOWED_S:
        time.sleep(0.05)
    if not left:
        gone_s = time.monotonic() - killed_s
    for process in left:
        process.kill()
    return Trial(seed, waited_s, before, len(left), gone_s)


if __name__ == "__main__":
    sys.exit(run_campaign(campaign, __doc__))
