import json

import pytest

from stretto.cli.main import main
from stretto.doctor.checks import CHECKS


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_there_is_one_line_a_check_and_nothing_is_left_behind(tmp_path, capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS)
    assert {line[:6] for line in lines} <= {"ok    ", "warn  "}
    assert list(tmp_path.iterdir()) == []


def test_as_json_there_is_one_object_a_line(capsys):
    assert main(["doctor", "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    keys = ["check", "status", "ranks", "finding", "advice"]
    assert [list(found) for found in objects] == [keys] * len(CHECKS)


def test_a_failure_is_a_line_that_says_what_to_do_and_exit_code_1(capsys):
    assert main(["doctor", "run.heartbeat_timeout_s=400"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert line.startswith("FAIL  time-outs: ")
    assert line.endswith("; raise run.timeout_s above 400")


def test_with_a_run_file_the_disk_space_is_that_of_its_checkpoints(tmp_path, capsys):
    (tmp_path / "run.toml").write_text("[data]\nsamples = 64\n[train]\nbatch = 8\n")
    assert main(["doctor", "run.toml", "run.name=other"]) == 0
    out = capsys.readouterr().out
    assert "runs/other, 3 checkpoints may need" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.toml"], "nowhere.toml"),
        (["run.heartbeat_timout_s=4"], "heartbeat_timeout_s"),
        (["--patience", "0"], "--patience 0"),
        (["--workers", "0"], "--workers 0"),
        (["--workers", "5000"], "--workers 5000"),
    ],
)
def test_the_callers_mistake_is_one_message_and_exit_code_2(arguments, expected, capsys):
    assert main(["doctor", *arguments]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.out == ""


def test_words_of_a_launcher_that_contradict_are_told(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor"]) == 1
    assert "RANK=3 does not fit WORLD_SIZE=2" in capsys.readouterr().err
