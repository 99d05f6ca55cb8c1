"""The list of planted bugs is up to date: every text is in its file, every test exists."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tools.mutants import ROOT, Mutant, load_mutants, mutate

MUTANTS = load_mutants()


@cache
def functions_of(path: Path) -> set[str]:
    """Return the names of all functions of a file."""
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_core_has_at_least_80_mutants():
    assert len(MUTANTS) >= 80


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted_and_names_tests_that_exist(mutant):
    assert mutant.old != mutant.new
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.tests
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists()
        assert not name or name.partition("[")[0] in functions_of(ROOT / path), test


def test_a_mutant_whose_text_is_gone_is_not_planted(tmp_path):
    (tmp_path / "some.py").write_text("x = 1\nx = 2\n")
    stale = Mutant("name", "some.py", old="x = 3", new="x = 4", tests=())
    twice = Mutant("name", "some.py", old="x = ", new="y = ", tests=())
    assert mutate(stale, tmp_path) is None
    assert mutate(twice, tmp_path) is None
    planted = Mutant("name", "some.py", old="x = 2", new="x = 5", tests=())
    assert mutate(planted, tmp_path) == "x = 1\nx = 2\n"
    assert (tmp_path / "some.py").read_text() == "x = 1\nx = 5\n"
