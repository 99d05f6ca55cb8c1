"""Functions, files and modules stay within their limits; the tool that measures them is right."""

import ast
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest

from tools.size import ROOT, Measured, measure, percentile, python_files

SOURCE = ROOT / "src" / "stretto"
MOST_FILES = 274
"""260 before step programs (twelve files) and the choice of a strategy (two)."""
SMALL_MODULE_LINES = 60
MOST_SMALL_MODULES = 25


@pytest.fixture(scope="module")
def tree():
    return measure(python_files())


def test_nine_functions_in_ten_have_at_most_30_lines(tree):
    assert tree.function_p90 <= 30


def test_no_function_is_over_60_lines(tree):
    assert [f for f in tree.functions if f.size > 60] == []


def test_no_file_is_over_400_lines(tree):
    assert [f for f in tree.files if f.size > 400] == []


def test_no_constructor_takes_more_than_6_arguments(tree):
    assert [c for c in tree.constructors if c.size > 6] == []


def module_of(path: Path) -> str:
    parts = ("stretto", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def imported_names(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def small_modules(paths: list[Path]) -> list[str]:
    """Return the modules that are small, and that at most one other module imports."""
    importers: defaultdict[str, set[Path]] = defaultdict(set)
    for path in paths:
        for name in imported_names(path):
            importers[name].add(path)
    return [
        module_of(path)
        for path in paths
        if path.name != "__init__.py"
        and len(path.read_text().splitlines()) < SMALL_MODULE_LINES
        and len(importers[module_of(path)] - {path}) <= 1
    ]


def test_the_source_has_at_most_this_many_files():
    assert len(list(SOURCE.rglob("*.py"))) <= MOST_FILES


def test_few_modules_are_small_and_have_a_single_importer():
    assert len(small_modules(sorted(SOURCE.rglob("*.py")))) <= MOST_SMALL_MODULES


def test_a_small_module_with_one_importer_is_found_and_others_are_not(monkeypatch, tmp_path):
    monkeypatch.setattr("tests.unit.test_size.SOURCE", tmp_path)
    texts = {
        "main.py": "import stretto.once\nfrom stretto import twice\nimport stretto.large\n",
        "other.py": "from stretto.twice import x\nimport stretto.main, stretto.other\n",
        "third.py": "import stretto.main, stretto.other\n",
        "fourth.py": "import stretto.third\n",
        "fifth.py": "import stretto.third, stretto.fourth, stretto.other\n",
        "sixth.py": "import stretto.fourth, stretto.fifth\n",
        "seventh.py": "import stretto.fifth\n",
        "once.py": "x = 1\n",
        "twice.py": "x = 1\n",
        "large.py": "x = 1\n" * 60,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = small_modules([tmp_path / name for name in texts])
    assert found == ["stretto.sixth", "stretto.seventh", "stretto.once"]


def test_the_whole_tree_is_measured(tree):
    places = {f.where for f in tree.files}
    assert {"src/stretto/run.py", "tools/size.py", "examples/plain_pytorch.py"} <= places


@pytest.fixture
def measured(tmp_path):
    def run(text: str):
        path = tmp_path / "some.py"
        path.write_text(textwrap.dedent(text).lstrip())
        return measure([path], root=tmp_path)

    return run


def test_a_function_is_as_long_as_from_def_to_its_last_line(measured):
    sizes = measured(
        """
        @decorated
        def outer():
            def inner():
                return 1

            return inner
        """
    )
    assert sizes.functions == [Measured(5, "some.py:2 outer"), Measured(2, "some.py:3 inner")]
    assert sizes.files == [Measured(6, "some.py")]


def test_every_argument_of_a_constructor_counts_except_self(measured):
    sizes = measured(
        """
        class Wide:
            def __init__(self, a, /, b, *more, c=1, **rest):
                pass
        """
    )
    assert sizes.constructors == [Measured(5, "some.py:2 Wide")]


def test_a_dataclass_has_no_constructor_to_count(measured):
    sizes = measured(
        """
        @dataclass
        class Record:
            a: int
            b: int
        """
    )
    assert sizes.constructors == []


def test_suppressions_are_counted_in_comments_and_not_in_strings(measured):
    sizes = measured(
        """
        # ruff: noqa: N803 - a whole file
        a = 1  # noqa: E501 - a line
        b = 2  # type: ignore[misc]
        c = "no # noqa here"
        """
    )
    assert sizes.suppressions == ["some.py:1", "some.py:2", "some.py:3"]


@pytest.mark.parametrize(("values", "p90"), [([], 0), ([7], 7), (list(range(101)), 90)])
def test_the_ninetieth_percentile(values, p90):
    assert percentile(values, 90) == p90
