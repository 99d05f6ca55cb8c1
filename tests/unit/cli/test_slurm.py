"""``stretto slurm`` from the command line: what it writes, where, and when it writes nothing."""

import os
import sys
from pathlib import Path

import pytest

from stretto.cli.main import main

ASK = ["--nodes", "2", "--tasks-per-node", "4"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.toml").write_text('[run]\nname = "demo"\nthreads = 3\n')
    return tmp_path


def test_the_file_is_written_to_the_run_folder_and_its_place_is_the_answer(here, capsys):
    assert main(["slurm", "demo.toml", *ASK]) == 0
    file = here / "runs" / "demo" / "job.sbatch"
    assert capsys.readouterr().out == f"{file}\n"
    assert "#SBATCH --nodes=2 " in file.read_text()


def test_the_folder_of_the_logs_is_there_before_slurm_needs_it(here):
    main(["slurm", "demo.toml", *ASK])
    assert (here / "runs" / "demo" / "logs").is_dir()


def test_ranks_train_the_same_run_by_absolute_paths(here):
    main(["slurm", "demo.toml", "train.steps=5", "data.samples=64", *ASK])
    command = f"{sys.executable} -m stretto train {here}/demo.toml train.steps=5 data.samples=64\n"
    assert command in (here / "runs" / "demo" / "job.sbatch").read_text()


def test_threads_of_a_rank_become_its_cores(here):
    main(["slurm", "demo.toml", *ASK])
    assert "#SBATCH --cpus-per-task=3 " in (here / "runs" / "demo" / "job.sbatch").read_text()


def test_an_override_moves_the_run_and_so_the_file(here):
    main(["slurm", "demo.toml", "run.name=other", *ASK])
    assert "--job-name=other" in (here / "runs" / "other" / "job.sbatch").read_text()


def test_the_file_goes_where_it_is_sent(here):
    (here / "batch").mkdir()
    main(["slurm", "demo.toml", *ASK, "--out", "batch/mine.sh"])
    assert (here / "batch" / "mine.sh").is_file()
    assert not (here / "runs" / "demo" / "job.sbatch").exists()


@pytest.mark.parametrize(
    ("image", "expected"), [("my.sif", "{here}/my.sif"), ("docker://a/b", "docker://a/b")]
)
def test_a_container_is_named_so_that_every_node_finds_it(here, image, expected):
    main(["slurm", "demo.toml", *ASK, "--container", image, "--gpus-per-node", "2"])
    text = (here / "runs" / "demo" / "job.sbatch").read_text()
    assert f"  apptainer exec --nv {expected.format(here=here)} stretto train {here}/demo" in text


@pytest.mark.parametrize(
    ("image", "missing"), [("there.sif", False), ("gone.sif", True), ("docker://a/b", False)]
)
def test_an_image_that_this_host_does_not_see_is_told_and_the_job_written(
    here, capsys, image, missing
):
    (here / "there.sif").touch()
    assert main(["slurm", "demo.toml", *ASK, "--container", image]) == 0
    warning = f"warning: --container {here}/{image} is not there"
    output = capsys.readouterr().err
    assert (warning in output, "warning" in output) == (missing, missing)
    assert (here / "runs" / "demo" / "job.sbatch").is_file()


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        (["missing.toml", *ASK], "missing.toml"),
        (["demo.toml", "train.bacth=4", *ASK], "train.bacth = 4"),
        (["demo.toml", "--nodes", "0", "--tasks-per-node", "4"], "--nodes 0"),
        (["demo.toml", *ASK, "--time", "banana"], "--time 'banana'"),
        (["demo.toml", *ASK, "--time", "00:01:00", "--warn", "120"], "--warn 120"),
        (["demo.toml", *ASK, "--out", "."], "--out . is a folder: name a file"),
        (["demo.toml", *ASK, "--out", "nope/x.sbatch"], "there is no folder nope"),
        (["demo.toml", "--nodes", "2"], "--tasks-per-node"),
    ],
)
def test_a_mistake_is_the_callers_and_nothing_is_written(here, capsys, arguments, expected_text):
    assert main(["slurm", *arguments]) == 2
    output = capsys.readouterr()
    assert expected_text in output.err + output.out
    assert [path.name for path in here.iterdir()] == ["demo.toml"]


def test_a_run_that_is_there_already_is_not_submitted_over_itself(here, capsys):
    (here / "runs" / "demo" / "checkpoints" / "step-00000008").mkdir(parents=True)
    assert main(["slurm", "demo.toml", *ASK]) == 2
    assert "--resume" in capsys.readouterr().err
    assert not (here / "runs" / "demo" / "job.sbatch").exists()


def test_a_run_that_is_there_already_may_be_gone_on_with(here):
    (here / "runs" / "demo" / "checkpoints" / "step-00000008").mkdir(parents=True)
    assert main(["slurm", "demo.toml", *ASK, "--resume"]) == 0
    assert "demo.toml --resume\n" in (here / "runs" / "demo" / "job.sbatch").read_text()


@pytest.fixture
def sbatch(here, monkeypatch):
    def program(body: str) -> None:
        path = here / "bin" / "sbatch"
        path.parent.mkdir()
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{here}/bin{os.pathsep}{os.environ['PATH']}")
    return program


def test_submitting_prints_the_jobs_id_alone(here, capsys, sbatch):
    sbatch('grep -q "job-name=demo" "$2" && echo 17')
    assert main(["slurm", "demo.toml", *ASK, "--submit"]) == 0
    output = capsys.readouterr()
    assert output.out == "17\n"
    assert str(here / "runs" / "demo" / "job.sbatch") in output.err


def test_a_refusal_of_sbatch_fails_the_command_with_its_words(capsys, sbatch):
    sbatch("echo 'invalid account' >&2; exit 1")
    assert main(["slurm", "demo.toml", *ASK, "--submit"]) == 1
    assert "invalid account" in capsys.readouterr().err


def test_without_sbatch_the_file_is_kept_and_the_command_fails(here, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(here))
    assert main(["slurm", "demo.toml", *ASK, "--submit"]) == 1
    assert "sbatch is not on PATH" in capsys.readouterr().err
    assert Path("runs/demo/job.sbatch").is_file()


@pytest.mark.parametrize(("more", "warns"), [([], False), (["--gpus-per-node", "2"], True)])
def test_gpus_that_training_leaves_idle_are_warned_of(here, capsys, more, warns):
    assert main(["slurm", "demo.toml", *ASK, *more]) == 0
    assert ("reserves GPUs that stretto train does not use yet" in capsys.readouterr().err) is warns
