"""The sbatch file: its options, its quoting, and what its body does when bash runs it."""

import os
import re
import shlex
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import ConfigError, LaunchError
from stretto.launch.slurm import JobSpec, parse_time_limit_s, rank_command, sbatch_text, submit

PLAIN = JobSpec(
    name="demo",
    command=("/env/bin/python", "-m", "stretto", "train", "/runs/demo.toml"),
    folder=Path("/home/me"),
    logs=Path("/home/me/runs/demo/logs"),
    nodes=2,
    tasks_per_node=4,
)


def options(text: str) -> dict[str, str]:
    """Return the options as sbatch reads them, with shell quotes and with comments removed."""
    lines = [line for line in text.split("\n") if line.startswith("#SBATCH ")]
    tokens = [shlex.split(line.removeprefix("#SBATCH "), comments=True) for line in lines]
    assert all(len(token) == 1 for token in tokens)
    return dict(token[0].partition("=")[::2] for token in tokens)


def log_of(text: str) -> str:
    return options(text)["--output"]


def srun_arguments(text: str) -> list[str]:
    found = re.search(r"^srun .*?(?=\ncode=)", text, re.MULTILINE | re.DOTALL)
    return shlex.split(found[0].replace("\\\n", ""))  # as bash joins lines


# What it says


def test_a_plain_job_has_no_optional_settings():
    assert options(sbatch_text(PLAIN)) == {
        "--job-name": "demo",
        "--nodes": "2",
        "--ntasks-per-node": "4",
        "--signal": "USR1@120",
        "--requeue": "",
        "--open-mode": "append",
        "--output": "/home/me/runs/demo/logs/slurm-%j.log",
    }


def test_every_setting_appears_in_the_file():
    spec = replace(
        PLAIN,
        cpus_per_task=3,
        gpus_per_node=2,
        time="12:00:00",
        partition="long",
        account="us",
        warn_s=60,
    )
    asked = options(sbatch_text(spec))
    assert (
        asked.items()
        >= {
            "--cpus-per-task": "3",
            "--gpus-per-node": "2",
            "--time": "12:00:00",
            "--partition": "long",
            "--account": "us",
            "--signal": "USR1@60",
        }.items()
    )


def test_every_option_has_a_comment():
    lines = [line for line in sbatch_text(PLAIN).splitlines() if line.startswith("#SBATCH")]
    assert all(re.search(r"  # \w", line) for line in lines)


def test_srun_starts_the_command_with_a_log_for_each_rank():
    assert srun_arguments(sbatch_text(PLAIN)) == [
        "srun",
        "--kill-on-bad-exit=1",
        "--distribution=block",
        "--output=/home/me/runs/demo/logs/slurm-%j-rank-%t.log",
        "--open-mode=append",
        *PLAIN.command,
    ]


def test_srun_gets_the_cores_of_a_rank_itself():
    text = sbatch_text(replace(PLAIN, cpus_per_task=3))
    assert "--cpus-per-task=3" in srun_arguments(text)


def test_the_file_names_no_hardware_vendor():
    text = sbatch_text(replace(PLAIN, gpus_per_node=4))
    assert not re.search(r"NCCL|GLOO|UCX|IFNAME|module|mlx|ib0|eth0", text)


def test_the_setup_lines_precede_the_ranks_unchanged():
    text = sbatch_text(replace(PLAIN, setup='module load "python/3.11" && echo $HOME'))
    before, _, _ = text.partition("srun")
    assert '\nmodule load "python/3.11" && echo $HOME\n' in before


def test_ranks_run_the_python_of_this_environment():
    command = rank_command(["train", "a.toml"], python=Path("/env/bin/python"))
    assert command == ("/env/bin/python", "-m", "stretto", "train", "a.toml")


@pytest.mark.parametrize(("gpus", "driver"), [(False, ()), (True, ("--nv",))])
def test_a_container_gets_the_hosts_driver_only_with_gpus(gpus, driver):
    command = rank_command(["train", "a"], python=Path("/p"), container="/i.sif", gpus=gpus)
    assert command == ("apptainer", "exec", *driver, "/i.sif", "stretto", "train", "a")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 0}, "--nodes 0"),
        ({"tasks_per_node": -1}, "--tasks-per-node -1"),
        ({"gpus_per_node": 0}, "--gpus-per-node 0"),
        ({"warn_s": 0}, "--warn 0"),
        ({"time": "12 hours"}, "--time '12 hours'"),
        ({"time": "0:00"}, "above zero"),
        ({"time": "4", "warn_s": 120}, "--warn 120 is not below half of --time 4 (240 s)"),
        ({"partition": "a\n#SBATCH --x"}, "--partition"),
        ({"account": ""}, "--account ''"),
        ({"logs": Path("/a\\b")}, "run.folder"),
        ({"logs": Path("/a\nb")}, "run.folder"),
    ],
)
def test_values_that_slurm_would_misread_are_refused(wrong, message):
    with pytest.raises(ConfigError) as refused:
        replace(PLAIN, **wrong)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("12:00:00", 43200),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("2-00:00:01", 172801),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(written, seconds):
    assert parse_time_limit_s(written) == seconds


@pytest.mark.parametrize("written", ["banana", "", "1:2:3:4", "1-", "-5", "1-2-3", "1.5", "12h"])
def test_the_error_for_an_invalid_limit_lists_the_formats(written):
    with pytest.raises(ConfigError, match="MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS"):
        parse_time_limit_s(written)


def test_a_warning_just_below_half_of_the_limit_is_accepted():
    assert "USR1@119" in sbatch_text(replace(PLAIN, time="4", warn_s=119))


nasty = st.sampled_from("%j '\"$#`!*&;|<>()[]{}~=:-")
anything = st.characters(exclude_categories=["Cs", "Cc"])
names = st.text(nasty | anything.filter(lambda letter: letter not in "/\\"))


@given(folder=names, overrides=st.lists(st.text(nasty | anything)))
def test_any_path_and_any_override_survive_quoting(folder, overrides):
    logs, command = Path("/r") / f"x{folder}" / "logs", ("python", *overrides)
    text = sbatch_text(replace(PLAIN, logs=logs, command=command))
    as_slurm_fills_it = re.sub(r"%(.)", lambda sign: {"%": "%", "j": "42"}[sign[1]], log_of(text))
    assert as_slurm_fills_it == f"{logs}/slurm-42.log"
    assert srun_arguments(text)[-len(command) :] == list(command)


# What it does


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Put commands of Slurm on PATH that write down what they were called with."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "42")

    def program(name: str, body: str) -> None:
        path = programs / name
        path.write_text(f'#!/bin/bash\necho "$PWD: {name} $*" >> {tmp_path}/calls\n{body}\n')
        path.chmod(0o755)

    program("squeue", "echo RUNNING")
    program("scontrol", "exit 0")
    return program


def script(tmp_path, **changes) -> Path:
    folder = tmp_path / "my $HOME's %j"
    folder.mkdir()
    path = tmp_path / "job.sbatch"
    path.write_text(sbatch_text(replace(PLAIN, folder=folder, logs=folder / "logs", **changes)))
    return path


def calls(tmp_path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def bash(*arguments) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=30
    )


def test_bash_accepts_the_syntax(tmp_path):
    done = bash("-n", script(tmp_path, cpus_per_task=2, setup="true"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("code", "queued_again"), [(0, False), (1, False), (75, True), (143, False)]
)
def test_only_a_run_that_saved_on_request_is_requeued(tmp_path, cluster, code, queued_again):
    cluster("srun", f"exit {code}")
    done = bash(script(tmp_path))
    assert done.returncode == (0 if queued_again else code)
    assert any("scontrol requeue 42" in call for call in calls(tmp_path)) == queued_again


@pytest.mark.parametrize(
    ("squeue", "state"),
    [("echo COMPLETING", "COMPLETING"), ("echo CANCELLED", "CANCELLED"), ("exit 1", "unknown")],
)
def test_a_job_that_is_no_longer_running_is_not_requeued(tmp_path, cluster, squeue, state):
    cluster("srun", "exit 75")
    cluster("squeue", squeue)
    done = bash(script(tmp_path))
    assert done.returncode == 75
    assert f"not queued again: the job is {state}\n" in done.stderr
    assert not any("scontrol" in call for call in calls(tmp_path))


def test_slurm_is_asked_for_the_state_of_this_job(tmp_path, cluster):
    cluster("srun", "exit 75")
    bash(script(tmp_path))
    (asked,) = [call for call in calls(tmp_path) if "squeue" in call]
    assert asked.endswith("squeue --noheader --states=all --jobs 42 --format %T")


def test_a_failed_requeue_is_reported_and_keeps_the_exit_code(tmp_path, cluster):
    cluster("srun", "exit 75")
    cluster("scontrol", "exit 1")
    done = bash(script(tmp_path))
    assert done.returncode == 75
    assert "could not queue" in done.stderr


def test_ranks_start_in_the_folder_where_the_command_was_given(tmp_path, cluster):
    cluster("srun", "exit 0")
    bash(script(tmp_path))
    assert calls(tmp_path)[0].startswith(f"{tmp_path}/my $HOME's %j: srun ")


def test_a_missing_folder_ends_the_job_before_any_rank_starts(tmp_path, cluster):
    cluster("srun", "exit 0")
    path = script(tmp_path)
    (tmp_path / "my $HOME's %j").rmdir()
    assert bash(path).returncode == 1
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_the_shell_does_not_prevent_the_requeue_of_a_saved_run(
    tmp_path, cluster, signum
):
    cluster(
        "srun", f"touch {tmp_path}/up; until [ -e {tmp_path}/go ]; do sleep 0.02; done; exit 75"
    )
    shell = subprocess.Popen(["bash", str(script(tmp_path))])
    try:
        deadline = time.monotonic() + 20
        while not (tmp_path / "up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        shell.send_signal(signum)
        (tmp_path / "go").touch()
        assert shell.wait(20) == 0
    finally:
        (tmp_path / "go").touch()
        shell.kill()
        shell.wait()
    assert any("scontrol requeue 42" in call for call in calls(tmp_path))


# How it is handed in


@pytest.mark.parametrize("answer", ["17", "17;cluster"])
def test_submitting_returns_the_jobs_id(tmp_path, cluster, answer):
    cluster("sbatch", f"echo '{answer}'")
    assert submit(tmp_path / "job.sbatch") == "17"
    assert calls(tmp_path) == [f"{Path.cwd()}: sbatch --parsable {tmp_path}/job.sbatch"]


def test_the_error_of_sbatch_is_reported_in_one_message(tmp_path, cluster):
    cluster("sbatch", "echo 'sbatch: error: no such partition' >&2; echo ' bye' >&2; exit 1")
    with pytest.raises(LaunchError, match=r"refused .*: sbatch: error: no such partition; bye$"):
        submit(tmp_path / "job.sbatch")


def test_an_sbatch_that_fails_without_output_is_reported_by_its_code(tmp_path, cluster):
    cluster("sbatch", "exit 3")
    with pytest.raises(LaunchError, match="it ended with 3"):
        submit(tmp_path / "job.sbatch")


def test_a_missing_sbatch_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="sbatch is not on PATH"):
        submit(tmp_path / "job.sbatch")
