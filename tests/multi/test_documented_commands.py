"""Every ``stretto`` command that a user finds in a document works when it is typed.

The commands of a document run in order, in a copy of the tree. A line may end with a comment that
says why it is not run here: ``# needs root``, ``# needs a cluster`` or ``# minutes``; it is only
parsed. A line that is meant to fail says so: ``# exit code 2``.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from stretto.cli.main import COMMANDS, build_app, main
from tests.unit.test_documents import ROOT, stretto_commands

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
DOCUMENTS = ["README.md", "docs/get-started.md", *(str(p.relative_to(ROOT)) for p in GUIDES)]
ONLY_PARSED = ("needs root", "needs a cluster", "minutes")
COMMAND_LIMIT_S = 400
SHELLS = ("", "bash", "sh", "console")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SHORTER: dict[str, tuple[str, ...]] = {
    "train --resume": ("train.steps=3",),
    "train": ("train.steps=2",),
    "study workers": ("train.steps=2",),
    "study batch": ("train.steps=2",),
    "demo": ("--workers 2", "--strategies allreduce"),
}
"""By how a command begins, or by its flag: what is appended, so that it takes seconds."""
IN_PROCESS = ("simulate", "plan", "profile", "recipe", "show", "export", "slurm", "study")
"""Commands that start no ranks: the test calls the program's main function."""

NOT_COPIED = (".*", "src", "tests", "records", "runs", "dist", "__pycache__")


@dataclass(frozen=True)
class DocumentedCommand:
    """A line of a document: the command, and what the comment behind it says."""

    line: str
    comment: str = ""

    @property
    def is_run(self) -> bool:
        return not any(reason in self.comment for reason in ONLY_PARSED)

    @property
    def exit_codes(self) -> set[int]:
        """The codes with which it may end; a doctor may find something here."""
        stated = re.search(r"exit code (\d+)", self.comment)
        if stated:
            return {int(stated[1])}
        return {0, 1} if self.line.startswith("stretto doctor") else {0}

    def shortened(self) -> str:
        """Return the command with overrides that make it short, unless it is part of a pipe."""
        if re.search(r"[|;&>]", self.line):
            return self.line
        for beginning, more in SHORTER.items():
            name, _, flag = beginning.partition(" --")
            if self.begins_with(name) and (not flag or f"--{flag}" in self.line):
                return " ".join([self.line.replace("--workers 4", "--workers 2"), *more])
        return self.line

    def begins_with(self, name: str) -> bool:
        return f"{self.line} ".startswith(f"stretto {name} ")

    @property
    def arguments(self) -> list[str] | None:
        """What the program's main function gets; None if only a shell can run the line."""
        if re.search(r"[|;&><$]", self.line) or not any(map(self.begins_with, IN_PROCESS)):
            return None
        return shlex.split(self.shortened())[1:]


def commands_of(document: str) -> list[DocumentedCommand]:
    """Return the commands in the blocks of a document, in order; none where it is missing."""
    text = (ROOT / document).read_text() if (ROOT / document).exists() else ""
    found = []
    for language, block in FENCE.findall(text):
        lines = block.replace("\\\n", " ").splitlines() if language in SHELLS else []
        for line in lines:
            command, _, comment = line.strip().removeprefix("$ ").partition(" #")
            arguments = command.split()[1:]
            if command.startswith("stretto ") and arguments and arguments[0] in COMMANDS:
                found.append(DocumentedCommand(command.strip(), comment.strip()))
    return found


COMMANDS_BY_DOCUMENT = {document: commands_of(document) for document in DOCUMENTS}


def test_commands_are_found():
    assert all((ROOT / document).exists() for document in DOCUMENTS)
    assert len(DOCUMENTS) >= 8
    assert len(COMMANDS_BY_DOCUMENT["README.md"]) >= 3
    assert sum(map(len, COMMANDS_BY_DOCUMENT.values())) >= 25


def test_at_most_a_third_of_the_commands_is_only_parsed():
    commands = [one for found in COMMANDS_BY_DOCUMENT.values() for one in found]
    not_run = [one.line for one in commands if not one.is_run]
    assert len(not_run) <= len(commands) / 3, "\n".join(not_run)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_that_are_not_run_parse(document):
    for command in COMMANDS_BY_DOCUMENT[document]:
        for arguments in stretto_commands(command.line):
            build_app().parse_args(arguments, exit_on_error=False, print_error=False)


def test_overrides_that_shorten_a_command_are_at_its_end():
    assert (
        DocumentedCommand("stretto train a.toml").shortened()
        == "stretto train a.toml train.steps=2"
    )
    resumed = DocumentedCommand("stretto train a.toml --resume").shortened()
    assert resumed == "stretto train a.toml --resume train.steps=3"
    assert DocumentedCommand("stretto show ring").shortened() == "stretto show ring"
    piped = "stretto train a.toml | tee log"
    assert DocumentedCommand(piped).shortened() == piped


@pytest.fixture
def tree_copy(tmp_path):
    """Return a copy of what commands in documents name, with ``stretto`` on its path."""
    copy = tmp_path / "stretto"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    shutil.copytree(ROOT / "benchmarks" / "runs", copy / "benchmarks" / "runs")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "stretto").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m stretto "$@"\n')
    (programs / "stretto").chmod(0o755)
    return copy


@pytest.mark.multi
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_commands_of_a_document_run_in_order(document, tree_copy, monkeypatch, capfd):
    monkeypatch.chdir(tree_copy)
    monkeypatch.setattr(sys, "path", list(sys.path))  # commands add folders of run files
    commands = [command for command in COMMANDS_BY_DOCUMENT[document] if command.is_run]
    for command in commands:
        if command.arguments is None:
            code = run(command.shortened(), tree_copy)
        else:
            code = main(command.arguments)
        output = capfd.readouterr()
        assert code in command.exit_codes, (
            f"{document}: {command.shortened()}\nexit code {code}\n"
            f"{output.out[-2000:]}{output.err[-2000:]}"
        )


def run(line: str, folder: Path) -> int:
    """Run a line in a shell, with ``stretto`` on its path; return its exit code."""
    search = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    programs = os.pathsep.join([str(folder.parent / "bin"), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        # One thread each: the ranks share a few cores, and waiting threads would spin.
        env={**os.environ, "PATH": programs, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=COMMAND_LIMIT_S,
    ).returncode
