"""Stop one rank of a job (SIGSTOP), and check that it is reported in time.

    python -m benchmarks.rank_stops --count 20 --seed 7

Prints a JSON object per trial, then the count; the exit status is 1 if a trial failed. Also checks
that the job ends by itself after the heartbeat timeout, names the rank as the reason, and leaves no
process.
"""

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faulty_job import a_while, await_steps, await_true, of_job, start, write_job
from benchmarks.trials import run_campaign

RANKS = 4
ALLOWED_S = 10.0
HEARTBEAT_TIMEOUT_S = 8.0
"""The heartbeat timeout of the job; the default is longer and would make the campaign longer."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One stopped rank, and what the job reported."""

    seed: int
    stopped_rank: int
    named: str
    named_after_s: float
    ended_with: int
    verdict: str
    alive_after: int

    @property
    def passed(self) -> bool:
        """Whether the right rank was named in time, and the job ended because of it."""
        right = f"rank {self.stopped_rank} silent"
        return (
            right in self.named
            and self.named_after_s <= ALLOWED_S
            and self.ended_with == 1
            and right in self.verdict
            and self.alive_after == 0
        )


def campaign(count: int, seed: int) -> Iterator[Trial]:
    """Yield ``count`` trials; every rank has its turn."""
    with tempfile.TemporaryDirectory(prefix="stretto-stops-") as folder:
        run_file = write_job(Path(folder))
        for index in range(count):
            yield one_trial(run_file, seed + index, index % RANKS)


def one_trial(run_file: Path, seed: int, rank: int) -> Trial:
    """Stop ``rank`` during training; read the job's output until it ends."""
    name = f"job-{seed}"
    log = run_file.parent / f"{name}.log"
    job = start(run_file, name, log, f"run.heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S}")
    await_steps(run_file.parent / "runs" / name, 2)
    time.sleep(a_while(seed, 1.0))
    rank_process(name, rank).send_signal(signal.SIGSTOP)
    named_after_s = await_true(lambda: bool(silent_lines(log)), 60, f"a report about rank {rank}")
    code = job.wait(60)
    lines = silent_lines(log)
    return Trial(seed, rank, lines[0], named_after_s, code, lines[-1], len(of_job(name)))


def rank_process(name: str, rank: int) -> psutil.Process:
    """Return the process of ``rank``: the one whose parent has no rank."""
    ranks = [each for each in of_job(name) if each.environ().get("RANK") == str(rank)]
    return next(each for each in ranks if each.ppid() not in [other.pid for other in ranks])


def silent_lines(log: Path) -> list[str]:
    """Return the lines in which the job reports a silent rank."""
    return [line for line in log.read_text(errors="replace").splitlines() if "silent for" in line]


if __name__ == "__main__":
    sys.exit(run_campaign(campaign, __doc__))
