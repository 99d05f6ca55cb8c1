"""Plant known one-line bugs in a copy of the tree, one at a time, and see the tests catch each.

    python tools/mutants.py [--only WORD] [--sample N --seed S] [--jobs 2]

The bugs stand in ``tests/mutants/*.toml``. Each names a file, a piece of it that occurs once, what
replaces it, and the tests that must fail then. A bug that no test catches is a survivor; one whose
text is no longer in the file is stale. Either makes the exit code 1. Before any bug is planted, all
named tests must pass, so that a test that always fails catches nothing.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "mutants"
COPIED = ("src", "tests", "tools", "benchmarks", "examples", "pyproject.toml", "README.md")
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug: ``old`` occurs once in ``file`` and becomes ``new``; ``tests`` must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant: "killed", "survived" or "stale", and after how many seconds."""

    mutant: Mutant
    word: str
    seconds: float


def load_mutants(folder: Path = LISTS) -> list[Mutant]:
    """Return all mutants; names are unique."""
    mutants = [
        Mutant(name, entry["file"], entry["old"], entry["new"], tuple(entry["tests"]))
        for path in sorted(folder.glob("*.toml"))
        for name, entry in tomllib.loads(path.read_text()).items()
    ]
    names = [mutant.name for mutant in mutants]
    if len(set(names)) < len(names):
        raise SystemExit(f"a name stands twice: {sorted({n for n in names if names.count(n) > 1})}")
    return mutants


def mutate(mutant: Mutant, tree: Path) -> str | None:
    """Plant the bug in ``tree``; return the file's text as it was, or None if the bug is stale."""
    path = tree / mutant.file
    text = path.read_text() if path.exists() else ""
    if text.count(mutant.old) != 1 or mutant.old == mutant.new:
        return None
    path.write_text(text.replace(mutant.old, mutant.new))
    return text


def tests_pass(tests: Sequence[str], tree: Path) -> bool:
    """Run tests in ``tree``; a run that hangs counts as one that fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environ = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    # Bytecode is checked by time and size, and a mutant may change neither.
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        done = subprocess.run(
            command, cwd=tree, env=environ, capture_output=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1, 2):  # no tests found, a wrong option: nothing was tried
        raise SystemExit(f"pytest could not run the tests:\n{done.stderr.decode()}")
    return done.returncode == 0


def try_mutant(mutant: Mutant, trees: "Queue[Path]") -> Outcome:
    """Plant one bug in a tree that is free, run its tests, and take the bug out again."""
    began = time.monotonic()
    tree = trees.get()
    try:
        text = mutate(mutant, tree)
        if text is None:
            return Outcome(mutant, "stale", 0.0)
        try:
            word = "survived" if tests_pass(mutant.tests, tree) else "killed"
        finally:
            (tree / mutant.file).write_text(text)
        return Outcome(mutant, word, time.monotonic() - began)
    finally:
        trees.put(tree)


def copy_tree(target: Path) -> Path:
    """Copy what tests need, without bytecode, to ``target``."""
    ignored = shutil.ignore_patterns("__pycache__", "records", ".*")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name)
    return target


def check_unmutated(mutants: Sequence[Mutant], tree: Path) -> None:
    """End the program if a named test fails without any bug."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    print(f"{len(tests)} named tests without a bug ...", flush=True)
    if not tests_pass(tests, tree):
        raise SystemExit("a named test fails without any bug: mend it first")


def main() -> int:
    """Try the mutants that were asked for; return 1 if one survived or is stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose name or file has this in it")
    parser.add_argument("--sample", type=int, help="so many of them, drawn with --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0))))
    asked = parser.parse_args()
    mutants = [m for m in load_mutants() if asked.only in m.name or asked.only in m.file]
    if asked.sample is not None:
        mutants = random.Random(asked.seed).sample(mutants, min(asked.sample, len(mutants)))
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for job in range(asked.jobs):
            trees.put(copy_tree(Path(folder) / str(job)))
        check_unmutated(mutants, Path(folder) / "0")
        outcomes = []
        with ThreadPoolExecutor(asked.jobs) as pool:
            for outcome in pool.map(lambda mutant: try_mutant(mutant, trees), mutants):
                outcomes.append(outcome)
                print(
                    f"{len(outcomes):>3}/{len(mutants)}  {outcome.word:<9}"
                    f"{outcome.seconds:>5.0f} s  {outcome.mutant.name}",
                    flush=True,
                )
    alive = [o for o in outcomes if o.word != "killed"]
    print(f"{len(outcomes)} mutants: {len(outcomes) - len(alive)} killed, {len(alive)} not")
    for outcome in alive:
        print(f"  {outcome.word}: {outcome.mutant.name} in {outcome.mutant.file}")
    return 1 if alive or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
