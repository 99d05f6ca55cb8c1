"""The reference pages are what the code says, and the hand-written ones miss nothing."""

import ast
import re
from pathlib import Path

import pytest
from pydantic import Field

from stretto.cli.main import COMMANDS
from stretto.config import Config
from stretto.errors import StrettoError
from stretto.run import RunConfig
from stretto.strategies import STRATEGIES
from stretto.telemetry.events import EVENTS
from stretto.train.config import TrainConfig
from stretto.units import Bytes
from tools import reference

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "stretto"
PAGES = ROOT / "docs" / "reference"
VARIABLE = re.compile(
    r"(?:STRETTO|SLURM|SLURMD|OMPI|PMIX|TORCH|TORCHELASTIC|MASTER|GLOO|OMP|WANDB|MLFLOW)_[A-Za-z_]+"
)


def page(name: str) -> str:
    return (PAGES / name).read_text()


@pytest.fixture(scope="module")
def generated():
    return reference.pages()


@pytest.mark.parametrize("name", ["run-file.md", "command-line.md", "events.md"])
def test_a_committed_page_is_what_the_code_gives_now(generated, name):
    assert generated.keys() == {"run-file.md", "command-line.md", "events.md"}
    assert page(name) == generated[name], "run `python tools/reference.py`"


def test_every_table_and_strategy_has_a_section():
    text = page("run-file.md")
    tables = [name for name in RunConfig.model_fields if name != "recipe"]
    assert [name for name in tables if f"\n## [{name}]\n" not in text] == []
    assert [kind for kind in STRATEGIES if f'\n### [strategy] kind = "{kind}"\n' not in text] == []
    assert [key for key in TrainConfig.model_fields if f"\n- `{key}`: " not in text] == []


def test_every_command_and_event_has_a_section():
    assert [
        name for name in COMMANDS if f"\n## stretto {name}" not in page("command-line.md")
    ] == []
    assert [name for name in EVENTS if f"\n## {name}\n" not in page("events.md")] == []


class Inner(Config):
    """What is inside."""

    depth: int = 1


class Outer(Config):
    """The ``[model]`` table of a run whose ``kind`` is ``"outer"``. It holds an inner one."""

    size: Bytes | None = None
    """The size of
    ``size`` things."""
    rate: float = Field(default=0.5, gt=0)
    inner: Inner = Inner()


class Changed(Outer):
    """Only a default differs."""

    size: Bytes | None = 3


def test_a_key_is_shown_with_type_limits_default_and_meaning():
    size = reference.field_lines("size", Outer)
    assert size == [
        '- `size`: a size such as "2MB"; default not set',
        "  The size of `size` things.",
    ]
    assert reference.field_lines("rate", Outer) == ["- `rate`: a number, above 0; default `0.5`"]
    changed = reference.field_lines("size", Changed)
    assert changed == [
        '- `size`: a size such as "2MB"; default `3`',
        "  The size of `size` things.",
    ]


def test_a_table_inside_a_table_has_a_section_of_its_own():
    lines = reference.key_lines("model", Outer)
    assert (
        lines[-4:]
        == [
            "### [model.inner]",
            "",
            "What is inside.",
            "",
            "- `depth`: a whole number; default `1`",
        ][-4:]
    )
    assert "- `inner`: a table; default the defaults below" in lines


def test_the_first_sentence_of_a_table_is_left_out_where_the_heading_says_it():
    assert reference.docstring_lines(Outer) == ["It holds an inner one.", ""]


def variables_in(path: Path) -> set[str]:
    """Return the environment variables that a module names in its strings."""
    nodes = ast.walk(ast.parse(path.read_text()))
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return {text for text in texts if VARIABLE.fullmatch(text)}


def test_every_environment_variable_that_the_code_names_is_documented_and_no_other():
    named = set().union(*(variables_in(path) for path in SOURCE.rglob("*.py")))
    documented = set(VARIABLE.findall(page("environment-variables.md")))
    by_libraries = {"WANDB_MODE"}
    assert named - documented == set()
    assert documented - named <= by_libraries


def test_every_exit_code_of_our_errors_is_documented():
    def subclasses(kind):
        return {kind}.union(*(subclasses(one) for one in kind.__subclasses__()))

    codes = {kind.exit_code for kind in subclasses(StrettoError) if kind.__module__ != __name__}
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page("exit-codes.md"), re.M)}
    assert {0, 130, 141, *codes} <= documented


def test_every_fact_of_a_checkpoint_is_documented():
    text = (SOURCE / "train" / "state.py").read_text()
    facts = re.search(r"\n    facts = \{\n(.*?)\n    \}\n", text, re.DOTALL)[1]
    keys = re.findall(r'^        "(\w+)":', facts, re.MULTILINE)
    assert len(keys) >= 8
    assert [key for key in keys if f"\n| `{key}` | " not in page("checkpoint-format.md")] == []
