"""Kill the launcher of a job (-9) at a random moment; see whether any of its processes lives on.

    python -m benchmarks.launcher_kills --count 20 --seed 7

The job has four ranks with a decoder process each. One JSON object a trial, then a line that
counts; exit status 1 if one failed.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.faulty_job import a_while, await_steps, of_job, start, write_job

ALLOWED_S = 5.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One kill and what was left."""

    seed: int
    waited_s: float
    processes_before: int
    alive_after_5_s: int
    gone_after_s: float | None


def main() -> int:
    """Run the campaign; print a JSON object a trial and the count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    args = parser.parse_args()
    failed = 0
    for trial in campaign(args.count, args.seed):
        failed += trial.alive_after_5_s > 0
        print(json.dumps(asdict(trial)), flush=True)
    print(f"{args.count - failed} passed, {failed} failed")
    return 1 if failed else 0


def campaign(count: int, seed: int) -> Iterator[Trial]:
    """Yield ``count`` trials: every other kill falls into the start, the rest into training."""
    with tempfile.TemporaryDirectory(prefix="stretto-kills-") as place:
        run_file = write_job(Path(place))
        for index in range(count):
            yield one_trial(run_file, seed + index, training=index % 2 == 1)


def one_trial(run_file: Path, seed: int, *, training: bool) -> Trial:
    """Kill at a random moment; count what lives after the time allowed."""
    name = f"job-{seed}"
    job = start(run_file, name, run_file.parent / f"{name}.log")
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
    sys.exit(main())
