"""Hand a batch file to Slurm."""

import subprocess
from pathlib import Path

from stretto.errors import LaunchError


def submit(file: Path) -> str:
    """Submit ``file`` and return the job's id; Slurm's own words are passed on when it refuses."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise LaunchError(
            f"sbatch is not on PATH: {file} is written; submit it where the cluster's commands are"
        ) from None
    if done.returncode:
        reason = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
        raise LaunchError(f"sbatch refused {file}: {reason or f'it ended with {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]  # --parsable: the id, then perhaps the cluster
