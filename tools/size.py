"""The tail of the tree: the longest functions and files, the widest constructors, suppressions.

    python tools/size.py

The median function is about ten lines in any project; what makes one tiring is its tail.
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
"""What is measured; tests are exempt, as tables of cases may be long."""

_SUPPRESSION = re.compile(r"#\s*(?:ruff:\s*)?noqa\b|#\s*type:\s*ignore\b")


@dataclass(frozen=True, slots=True)
class Measured:
    """Something that has a place in the tree and a size."""

    size: int
    where: str


@dataclass(frozen=True, slots=True)
class Sizes:
    """All sizes of a tree; each list begins with its largest."""

    functions: list[Measured]
    """Lines from ``def`` to the last statement, docstring included, decorators not."""
    files: list[Measured]
    """Lines."""
    constructors: list[Measured]
    """Arguments of every ``__init__`` that is written out, beyond self."""
    suppressions: list[str]
    """Where a checker is told to look away."""

    @property
    def function_p90(self) -> float:
        """Return the length that nine functions in ten do not exceed."""
        return percentile([f.size for f in self.functions], 90)


def measure(paths: Sequence[Path], root: Path = ROOT) -> Sizes:
    """Measure Python files; places are told relative to ``root``."""
    sizes = Sizes([], [], [], [])
    for path in paths:
        text, place = path.read_text(), str(path.relative_to(root))
        tree = ast.parse(text)
        sizes.files.append(Measured(len(text.splitlines()), place))
        sizes.functions.extend(_functions(tree, place))
        sizes.constructors.extend(_constructors(tree, place))
        sizes.suppressions.extend(f"{place}:{line}" for line in _suppressions(text))
    for column in (sizes.functions, sizes.files, sizes.constructors):
        column.sort(key=lambda measured: (-measured.size, measured.where))
    return sizes


def python_files(root: Path = ROOT) -> list[Path]:
    """Return the files that count, in a fixed order."""
    return sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def percentile(values: Sequence[int], percent: int) -> float:
    """Return the smallest value that ``percent`` of all do not exceed, between two if need be."""
    if len(values) < 2:
        return float(sum(values))
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _functions(tree: ast.AST, place: str) -> Iterator[Measured]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            yield Measured(lines, f"{place}:{node.lineno} {node.name}")


def _constructors(tree: ast.AST, place: str) -> Iterator[Measured]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                taken = item.args
                named = len(taken.posonlyargs) + len(taken.args) + len(taken.kwonlyargs) - 1
                rest = (taken.vararg is not None) + (taken.kwarg is not None)
                yield Measured(named + rest, f"{place}:{item.lineno} {node.name}")


def _suppressions(text: str) -> Iterator[int]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # Comments only: a string that mentions one suppresses nothing.
        if token.type == tokenize.COMMENT and _SUPPRESSION.search(token.string):
            yield token.start[0]


def _print_top(title: str, rows: Sequence[Measured], count: int = 8) -> None:
    print(f"\n{title}")
    for row in rows[:count]:
        print(f"{row.size:>6}  {row.where}")


def main() -> None:
    """Print the tail."""
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
    for place in sizes.suppressions:
        print(f"        {place}")


if __name__ == "__main__":
    main()
