"""What each package may use: imports go downwards; few packages use the network or environment."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "stretto"

NETWORK = {
    "comm",
    "cluster",
    "checkpoint",
    "strategies",
    "bench",
    "profiler",
    "launch",
    "lab",
}
ENVIRONMENT = {"cluster", "launch", "lab"}
OTHER_ENGINES = {"bench"}
UNPICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


def names_used(text: str) -> Iterator[str]:
    """Yield every dotted name that a module imports or spells out, as ``os.environ``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def uses(text: str, *modules: str) -> list[str]:
    """Return the names in ``text`` that are one of ``modules`` or something inside it."""
    return sorted(
        name for name in names_used(text) for one in modules if f"{name}.".startswith(f"{one}.")
    )


def offenders(allowed: set[str], *modules: str) -> dict[str, list[str]]:
    """Return what modules outside of the ``allowed`` packages use, by path."""
    found = {
        str(path.relative_to(ROOT)): uses(path.read_text(), *modules)
        for path in sorted(SOURCE.rglob("*.py"))
        if package_of(path) not in allowed
    }
    return {path: names for path, names in found.items() if names}


def test_every_package_that_is_named_here_exists():
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages >= NETWORK | ENVIRONMENT | OTHER_ENGINES


def test_torch_distributed_is_used_only_where_it_may_be():
    assert offenders(NETWORK, "torch.distributed") == {}


def test_the_environment_is_read_only_in_cluster_launch_and_lab():
    assert offenders(ENVIRONMENT, "os.environ", "os.getenv", "os.environb", "os.putenv") == {}


def test_nothing_is_pickled_or_unpickled():
    assert offenders(set(), *UNPICKLING, "torch.load", "torch.save") == {}


@pytest.mark.parametrize("word", ["DistributedDataParallel", "fully_shard"])
def test_other_engines_are_mentioned_only_in_bench(word):
    mentions = [
        str(path.relative_to(ROOT))
        for path in sorted(SOURCE.rglob("*.py"))
        if word in path.read_text() and package_of(path) not in OTHER_ENGINES
    ]
    assert mentions == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed",
        "import torch.distributed.rpc as r",
        "from torch import distributed",
        "from torch.distributed import rpc",
        "import torch\nx = torch.distributed.get_rank()",
    ],
)
def test_every_way_to_import_torch_distributed_is_found(text):
    assert uses(text, "torch.distributed")


def test_a_module_whose_name_begins_the_same_is_another():
    assert uses("import pickleball\nfrom torch import distributions", "pickle", "torch.dist") == []


def test_imports_between_packages_go_downwards_only():
    command = Path(sys.executable).with_name("lint-imports")
    if not command.exists():
        pytest.fail(f"import-linter is not installed beside {sys.executable}: run `make check`")
    search = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [command, "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kept, 0 broken" in done.stdout
