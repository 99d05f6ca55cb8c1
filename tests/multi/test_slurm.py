"""Batch jobs on a real Slurm: warned, preempted, requeued or cancelled, with nothing lost."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from stretto.checkpoint import load_checkpoint
from stretto.cluster.detect import detect_world
from stretto.telemetry.events import RunEnded, RunStarted, StepDone
from stretto.telemetry.sinks import read_events

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

STEPS = 150
RUN = f"""
[run]
threads = 1
trace = false
[model]
kind = "gpt"
blocks = 2
width = 64
context = 32
dropout = 0.1
[data]
kind = "text"
path = "text.txt"
context = 32
[optim]
kind = "adamw"
warmup_steps = 5
[strategy]
algorithm = "native"  # "auto" would add in another order if ranks share a host
[train]
batch = 24
steps = {STEPS}
log_every = 1
eval_every = 1000
save_every = 1000
"""
STRETTO = [sys.executable, "-m", "stretto"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("jobs")
    (base / "run.toml").write_text(RUN)
    lines = [f"{n} bottles stand on wall {n * n % 97}\n" for n in range(4000)]
    (base / "text.txt").write_text("".join(lines))
    return base


def weights(folder, name):
    return load_checkpoint(folder / "runs" / name / "checkpoints" / f"step-{STEPS:08}").tensors


@pytest.fixture(scope="module")
def calm(folder):
    """The final state of an undisturbed run, started without Slurm."""
    command = [*STRETTO, "train", "run.toml", "run.name=calm", "--workers", "4"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return weights(folder, "calm")


def submit(folder, slurm, name):
    command = [*STRETTO, "slurm", "run.toml", f"run.name={name}", "--nodes", "2"]
    done = subprocess.run(
        [*command, "--tasks-per-node", "2", "--time", "30", "--partition", "low", "--submit"],
        cwd=folder,
        env=slurm.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def events(folder, name):
    path = folder / "runs" / name / "events.jsonl"
    return read_events(path) if path.exists() else []


def await_step(folder, slurm, name, job, step, timeout_s=90.0):
    deadline_s = time.monotonic() + timeout_s
    while max((e.step for e in events(folder, name) if isinstance(e, StepDone)), default=0) < step:
        state = slurm.job(job)["JobState"]
        assert time.monotonic() < deadline_s, f"job is {state}\n{output_of(folder, name)}"
        time.sleep(0.1)


def output_of(folder, name):
    logs = sorted((folder / "runs" / name / "logs").glob("*.log"))
    return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs)


def check_nothing_lost(folder, name, calm, *, stopped_by):
    """Check that the job was stopped and resumed at the same step, with an unchanged result."""
    starts = [e for e in events(folder, name) if isinstance(e, RunStarted)]
    stops = [e for e in events(folder, name) if isinstance(e, RunEnded) and e.again]
    assert len(starts) == 2, output_of(folder, name)
    assert stopped_by in stops[0].stopped
    done = events(folder, name)
    before = done[: done.index(starts[1])]
    last = max(e.step for e in before if isinstance(e, StepDone))
    resumed = int(starts[1].note.split()[-1])
    assert last - resumed <= 1
    assert 0 < resumed < STEPS
    tensors = weights(folder, name)
    assert tensors.keys() == calm.keys()
    assert all(torch.equal(tensors[name], calm[name]) for name in calm)


def test_the_doctor_reports_no_problem_in_a_job_step(folder, slurm):
    done = subprocess.run(
        ["srun", "-N2", "-n2", *STRETTO, "doctor", "run.toml", "--json"],
        cwd=folder,
        env=slurm.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {line["check"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, [line for line in found.values() if line["status"] == "FAIL"]
    assert found["peers"]["status"] == "ok"
    assert "slurm" in found["launcher"]["finding"]


def environment_of(text):
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


@pytest.mark.parametrize("allocate", [[], ["salloc", "-N1"]])
def test_a_job_without_a_batch_script_is_not_requeued(slurm, allocate):
    world = detect_world(
        environment_of(slurm.call(*allocate, "srun", "-N1", "-n1", "/usr/bin/env"))
    )
    assert (world.launcher, world.restart_command) == ("slurm", ())


@pytest.mark.parametrize("export", ["ALL", "NONE", "COLOUR=blue"])
def test_a_step_of_a_batch_job_is_requeued(slurm, tmp_path, export):
    found = f"export SLURM_CONF={slurm.environ['SLURM_CONF']} PATH={os.environ['PATH']}"
    script = f"{found}; srun -N1 -n1 /usr/bin/env"
    options = [f"--export={export}", f"--output={tmp_path / 'log'}"]
    job = slurm.call("sbatch", "--parsable", "-N1", *options, "--wrap", script).strip()
    slurm.wait_for(job, "COMPLETED", "FAILED")
    world = detect_world(environment_of((tmp_path / "log").read_text()))
    assert world.restart_command == ("scontrol", "requeue", job)


def test_a_job_warned_before_its_limit_saves_and_resumes_by_itself(folder, slurm, calm):
    job = submit(folder, slurm, "warned")
    await_step(folder, slurm, "warned", job, 5)
    slurm.call("scancel", "--signal=USR1", job)
    slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", timeout_s=150)
    check_nothing_lost(folder, "warned", calm, stopped_by="USR1")
    assert slurm.job(job)["Restarts"] == "1"


def test_a_preempted_job_saves_and_resumes_by_itself(folder, slurm, calm):
    job = submit(folder, slurm, "preempted")
    await_step(folder, slurm, "preempted", job, 5)
    slurm.call("sbatch", "-p", "high", "-N2", "-o", "/dev/null", "--wrap", "sleep 3")
    slurm.wait_for(job, "PENDING", timeout_s=60)
    slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", timeout_s=150)
    check_nothing_lost(folder, "preempted", calm, stopped_by="TERM")


def test_a_cancelled_job_saves_and_stays_cancelled(folder, slurm):
    job = submit(folder, slurm, "cancelled")
    await_step(folder, slurm, "cancelled", job, 5)
    slurm.call("scancel", job)
    ended = slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", timeout_s=60)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), output_of(
        folder, "cancelled"
    )
    saved = list((folder / "runs" / "cancelled" / "checkpoints").glob("step-????????"))
    assert saved, output_of(folder, "cancelled")
