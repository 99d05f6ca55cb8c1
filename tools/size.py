"""Print the longest functions and files, the widest constructors, and all suppressions.

    python tools/size.py

The median function has about ten lines in any project; the longest ones make it hard to read.
"""

import ast
import io
import re
import statistics
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tools", "benchmarks", "examples")
"""Folders to measure. Tests are exempt, because tables of cases may be long."""

_SUPPRESSION = re.compile(r"#\s*(?:ruff:\s*)?noqa\b|#\s*type:\s*ignore\b")


@dataclass(frozen=True, slots=True)
class Measured:
    """The size of a function, file or constructor, and where it is."""

    size: int
    where: str


@dataclass(frozen=True, slots=True)
class Sizes:
    """All sizes of a tree; each list is sorted from largest to smallest."""

    functions: list[Measured]
    """Lines from ``def`` to the last statement, with the docstring, without decorators."""
    files: list[Measured]
    """Lines."""
    constructors: list[Measured]
    """Number of arguments of every explicit ``__init__``, without self."""
    suppressions: list[str]
    """Places of ``noqa`` and ``type: ignore`` comments."""

    @property
    def function_p90(self) -> float:
        """Return the 90th percentile of function lengths."""
        return percentile([f.size for f in self.functions], 90)


def measure(paths: Sequence[Path], root: Path = ROOT) -> Sizes:
    """Measure Python files; paths in the result are relative to ``root``."""
    sizes = Sizes([], [], [], [])
    for path in paths:
        text, relative = path.read_text(), str(path.relative_to(root))
        tree = ast.parse(text)
        sizes.files.append(Measured(len(text.splitlines()), relative))
        sizes.functions.extend(_functions(tree, relative))
        sizes.constructors.extend(_constructors(tree, relative))
        sizes.suppressions.extend(f"{relative}:{line}" for line in _suppressions(text))
    for column in (sizes.functions, sizes.files, sizes.constructors):
        column.sort(key=lambda measured: (-measured.size, measured.where))
    return sizes


def python_files(root: Path = ROOT) -> list[Path]:
    """Return the files to measure, in a fixed order."""
    return sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def percentile(values: Sequence[int], percent: int) -> float:
    """Return the percentile of ``values``, interpolated between two values if necessary."""
    if len(values) < 2:
        return float(sum(values))
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _functions(tree: ast.AST, path: str) -> Iterator[Measured]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            yield Measured(lines, f"{path}:{node.lineno} {node.name}")


def _constructors(tree: ast.AST, path: str) -> Iterator[Measured]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                args = item.args
                named = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs) - 1
                starred = (args.vararg is not None) + (args.kwarg is not None)
                yield Measured(named + starred, f"{path}:{item.lineno} {node.name}")


def _suppressions(text: str) -> Iterator[int]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # Comments only: such text inside a string suppresses nothing.
        if token.type == tokenize.COMMENT and _SUPPRESSION.search(token.string):
            yield token.start[0]


def _print_top(title: str, rows: Sequence[Measured], count: int = 8) -> None:
    print(f"\n{title}")
    for row in rows[:count]:
        print(f"{row.size:>6}  {row.where}")


def main() -> None:
    """Print the report."""
    sizes = measure(python_files())
    lengths = [f.size for f in sizes.functions]
    print(
        f"{len(sizes.files)} files, {sum(f.size for f in sizes.files)} lines, "
        f"{len(lengths)} functions: median {statistics.median(lengths):g} lines, "
        f"p90 {sizes.function_p90:g}, longest {lengths[0]}"
    )
    _print_top("longest functions (lines)", sizes.functions)
    _print_top("longest files (lines)", sizes.files)
    _print_top("widest constructors (arguments beyond self)", sizes.constructors)
    print(f"\nsuppressions: {len(sizes.suppressions)}")
    for where in sizes.suppressions:
        print(f"        {where}")


if __name__ == "__main__":
    main()
