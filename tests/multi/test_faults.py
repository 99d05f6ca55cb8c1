"""Ranks that hang, launchers that die, slow saves; ``make campaign`` runs many more trials."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import launcher_kills, rank_stops
from benchmarks.faulty_job import await_true

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

SLOW_TO_SAVE = """
import time
from torch import nn

class Slow(nn.Sequential):
    def state_dict(self, *args, **named):
        time.sleep(6)
        return super().state_dict(*args, **named)

def build():
    return Slow(nn.Flatten(), nn.Linear(3 * 16 * 16, 8))
"""

CAMPAIGN = """
import sys
from pathlib import Path
from benchmarks.faulty_job import await_steps, start, write_job
folder = Path(sys.argv[1])
job = start(write_job(folder), "job", folder / "log")
await_steps(folder / "runs" / "job", 1)
print(job.pid, flush=True)
job.wait()
"""


def test_a_killed_launcher_leaves_no_process():
    trials = list(launcher_kills.campaign(count=2, seed=11))
    assert [trial.alive_after_5_s for trial in trials] == [0, 0]
    # The second kill is during training: ranks and their decoders were running.
    assert trials[1].processes_before > 4


def test_without_the_parent_death_signal_ranks_end_by_themselves(tmp_path):
    # setpriv is not on this PATH, so ranks start without the parent-death signal.
    _, training = launcher_kills.campaign(count=2, seed=12, path=str(tmp_path))
    assert training.alive_after_5_s == 0


def test_a_job_ends_with_the_campaign_that_started_it(tmp_path):
    command = [sys.executable, "-c", CAMPAIGN, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as campaign:
        job = psutil.Process(int(campaign.stdout.readline()))
        processes = [job, *job.children(recursive=True)]
        campaign.kill()
    assert len(processes) > 4
    await_true(lambda: not any(map(is_running, processes)), 10, "the end of the job")


def is_running(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_rank_that_hangs_is_reported_in_time():
    (trial,) = rank_stops.campaign(count=1, seed=11)
    assert trial.passed, trial


def test_ranks_that_wait_for_a_slow_save_are_not_reported_as_silent(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_TO_SAVE)
    (tmp_path / "run.toml").write_text(
        "[run]\nthreads = 1\nheartbeat_timeout_s = 3.0\n"
        '[model]\nkind = "custom"\ntarget = "slow:build"\n'
        "[data]\nsamples = 40\nsize = 16\n[train]\nbatch = 20\nsteps = 2\n"
    )
    command = [sys.executable, "-m", "stretto", "train", "run.toml", "--workers", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "silent" not in done.stderr


@pytest.mark.parametrize("signal_name", ["TERM", "USR1"])
def test_a_signal_before_the_import_of_torch_is_a_stop_request(tmp_path, signal_name):
    (tmp_path / "run.toml").write_text("[data]\nsamples = 40\nsize = 16\n[train]\nbatch = 20\n")
    command = [sys.executable, "-m", "stretto", "train", "run.toml"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        await_true(lambda: has_blocked_signals(process.pid), 60, "signals held back")
        process.send_signal(signal.Signals[f"SIG{signal_name}"])
        said = process.communicate(timeout=60)[1]
    assert (process.returncode, said.count("Traceback")) == (75, 0), said
    assert f"stopped by {signal_name} before the first step" in said


def has_blocked_signals(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk"))[8:], 16)
    return bool(blocked & 1 << (signal.SIGTERM - 1))
