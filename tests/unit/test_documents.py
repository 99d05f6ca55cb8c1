"""What the documents say is true: paths exist, commands parse, links lead somewhere, code runs."""

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stretto.cli.main import COMMANDS, build_app
from stretto.collectives.algorithms import ALLREDUCE
from stretto.collectives.schedule import pipeline_tensor
from stretto.collectives.verify import verify_allreduce
from stretto.comm.collective_executor import execute
from stretto.comm.in_process_transports import run_threads

ROOT = Path(__file__).resolve().parents[2]
HOMES = (ROOT, ROOT / "src" / "stretto")
TOP = ("README.md", "README.ko.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
DOCUMENTS = (*TOP, *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")))
GENERATED = {f"docs/reference/{name}.md" for name in ("run-file", "command-line", "events")}
DECISIONS = [name for name in DOCUMENTS if name.startswith("docs/adr/")]
DIARIES = {*DECISIONS, "CHANGELOG.md", "docs/log.md"}
"""Documents that keep the names, paths and commands of their day."""
WRITTEN = [name for name in DOCUMENTS if name not in GENERATED]
CURRENT = [name for name in WRITTEN if name not in DIARIES]
USER_GUIDES = [name for name in CURRENT if name not in ("ARCHITECTURE.md", "CONTRIBUTING.md")]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
_PATH = re.compile(
    r"(?:src|tests|docs|examples|benchmarks|tools|containers|\.ci)/[\w./-]*|[\w-]+\.md"
)
_MODULE = re.compile(r"[a-z_]+(?:/[a-z_]+)*\.py|[a-z_]+(?:/[a-z_]+)*/")
_PLACEHOLDER = re.compile(r"[A-Z]{4,}")
"""A part of a path that the reader replaces, as in ``src/stretto/cli/NAME.py``."""


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def blocks(document: str, language: str = "") -> list[str]:
    return [body for tag, body in _FENCE.findall(text_of(document)) if tag == language]


def quoted(document: str) -> list[str]:
    return _QUOTED.findall(_FENCE.sub("", text_of(document)))


def shown_lines(document: str) -> list[str]:
    """Return the lines of blocks that hold commands, comments cut off."""
    shown = [block for tag in ("", "bash", "sh", "console") for block in blocks(document, tag)]
    lines = [line for block in shown for line in block.replace("\\\n", " ").splitlines()]
    return [line.partition(" # ")[0].strip().removeprefix("$ ") for line in lines]


def command_lines(document: str) -> list[str]:
    """Return the same, and what stands between backticks."""
    return [*shown_lines(document), *quoted(document)]


def named_paths(document: str, pattern: re.Pattern[str] = _PATH) -> list[str]:
    arguments = {word for text in quoted(document) for word in text.split()}
    return sorted(
        word for word in arguments if pattern.fullmatch(word) and not _PLACEHOLDER.search(word)
    )


def is_there(path: str, document: str = "README.md") -> bool:
    homes = (*HOMES, (ROOT / document).parent)
    return any((home / path).exists() for home in homes)


def stretto_commands(line: str) -> Iterator[list[str]]:
    """Yield the arguments of ``stretto`` in a line, and of the one that a lab runs."""
    try:
        arguments = shlex.split(line)
    except ValueError:  # a sentence with an apostrophe, no command
        return
    if arguments[:1] != ["stretto"] or len(arguments) == 1:
        return
    yield arguments[1:]
    if "--" in arguments:
        yield from stretto_commands(shlex.join(arguments[arguments.index("--") + 1 :]))


def is_a_form(arguments: list[str]) -> bool:
    """Say whether arguments are a form such as ``train RUN [--resume]``, no command to be typed."""
    return any(re.search(r"[\[\]<>|]|\.\.\.|^[A-Z]+$", word) for word in arguments)


def unknown_words(arguments: list[str]) -> list[str]:
    """Return the commands and flags that arguments name and the parser does not know."""
    app = build_app()
    for word in arguments:
        if app.default_command is not None or word.startswith("-"):
            break
        if word not in list(app):
            return [word]
        app = app[word]
    if app.default_command is None:
        return []
    accepted = {name for one in app.assemble_argument_collection() for name in one.names}
    flags = [word.partition("=")[0] for word in itertools.takewhile(lambda w: w != "--", arguments)]
    return [flag for flag in flags if flag.startswith("--") and flag not in {*accepted, "--help"}]


def test_every_kind_of_document_is_found():
    assert "docs/log.md" in DIARIES
    assert len(DECISIONS) >= 24
    assert {name for name in DOCUMENTS if name in GENERATED} == GENERATED
    assert len(USER_GUIDES) >= 8


@pytest.mark.parametrize("document", CURRENT)
def test_every_path_that_is_named_exists(document):
    assert [path for path in named_paths(document) if not is_there(path, document)] == []


def test_every_module_that_the_architecture_names_exists():
    paths = [path for path in named_paths("ARCHITECTURE.md", _MODULE) if path not in RUN_FOLDERS]
    assert [path for path in paths if not is_there(path)] == []
    assert len(paths) > 30, "hardly a path was found: is the search broken?"


RUN_FOLDERS = {"tensorboard/", "wandb/", "mlruns/", "trackers/"}


@pytest.mark.parametrize("document", WRITTEN)
def test_every_link_into_the_tree_leads_somewhere(document):
    folder = (ROOT / document).parent
    assert [link for link in _LINK.findall(text_of(document)) if not (folder / link).exists()] == []


@pytest.mark.parametrize("document", CURRENT)
def test_every_make_target_that_is_named_exists(document):
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    named = {line.split()[1] for line in command_lines(document) if re.match(r"make [a-z]", line)}
    assert named <= targets


@pytest.mark.parametrize("document", [*CURRENT, "examples/text.toml", "examples/images.toml"])
def test_every_stretto_command_parses(document):
    app = build_app()
    lines = shown_lines(document)
    if document.endswith(".toml"):
        lines = [line.removeprefix("#").strip() for line in text_of(document).splitlines()]
    for line in lines:
        for arguments in stretto_commands(line) if line.startswith("stretto ") else ():
            if not is_a_form(arguments):
                app.parse_args(arguments, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("document", CURRENT)
def test_every_command_and_flag_that_is_mentioned_exists(document):
    mentioned = [
        arguments for line in command_lines(document) for arguments in stretto_commands(line)
    ]
    without_version = [arguments for arguments in mentioned if not arguments[0].startswith("-")]
    assert [
        unknown_words(arguments) for arguments in without_version if unknown_words(arguments)
    ] == []


def test_every_command_is_shown_in_a_document():
    lines = [line for document in USER_GUIDES for line in command_lines(document)]
    shown = {arguments[0] for line in lines for arguments in stretto_commands(line)}
    assert set(COMMANDS) <= shown


@pytest.mark.parametrize("document", ["README.md", "README.ko.md"])
def test_the_readme_is_at_most_120_lines(document):
    assert len(text_of(document).splitlines()) <= 120


def test_the_korean_readme_shows_the_same_commands_and_code():
    for language in ("", "python"):
        korean, english = blocks("README.ko.md", language), blocks("README.md", language)
        assert [block for block in korean if "stretto" in block and block not in english] == []


@pytest.mark.parametrize("document", CURRENT)
def test_lines_are_at_most_120_characters(document):
    # Neither a command nor a row of a table can be broken.
    prose = _FENCE.sub("", text_of(document)).splitlines()
    assert [line for line in prose if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "README.ko.md"])
def test_documents_are_plain_ascii(document):
    assert text_of(document).isascii()


@pytest.mark.parametrize("document", DECISIONS)
def test_a_decision_says_why_what_follows_and_what_was_rejected(document):
    text, number = text_of(document), Path(document).name[:4]
    assert re.match(rf"# {number} \S", text)
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == ["Context", "Decision", "Consequences", "Rejected"]


def test_decisions_are_numbered_without_a_gap():
    numbers = [int(Path(document).name[:4]) for document in DECISIONS]
    assert numbers == list(range(1, len(numbers) + 1))


# --- ARCHITECTURE.md ---


def section(document: str, heading: str) -> str:
    return text_of(document).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def table_rows(document: str, heading: str) -> list[list[str]]:
    """Return the cells of the rows of the first table of a section, without its head."""
    lines = [line for line in section(document, heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def defined_names(path: str) -> set[str]:
    """Return what a module defines: names at its top, and ``Class.method``."""
    home = next(home for home in HOMES if (home / path).exists())
    found: set[str] = set()
    for node in ast.parse((home / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)
            }
    return found


WHERE = table_rows("ARCHITECTURE.md", "Where is ...?")


def test_twenty_questions_have_an_answer():
    assert len(WHERE) >= 20
    assert all(question.endswith("?") for question, _, _ in WHERE)


@pytest.mark.parametrize(("question", "file", "name"), WHERE)
def test_the_answer_to_a_question_is_there(question, file, name):
    assert name.strip("`") in defined_names(file.strip("`")), question


def test_every_function_in_the_life_of_a_gradient_is_in_the_file_beside_it():
    life = section("ARCHITECTURE.md", "The life of a gradient")
    pairs = re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", life)
    assert [(name, file) for name, file in pairs if name not in defined_names(file)] == []
    assert len(pairs) > 30


def test_every_package_has_a_row():
    held = " ".join(row[0] for row in table_rows("ARCHITECTURE.md", "Packages"))
    source = ROOT / "src" / "stretto"
    packages = {f"{path.parent.name}/" for path in source.glob("*/__init__.py")}
    modules = {path.name for path in source.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert set(_QUOTED.findall(held)) == packages | modules


def test_the_packages_are_in_the_order_of_imports():
    rows = table_rows("ARCHITECTURE.md", "Packages")
    arguments = [word for row in rows for word in _QUOTED.findall(row[0])]
    listed = [word.rstrip("/").removesuffix(".py") for word in arguments]
    layers = re.search(r"^layers = \[\n(.*?)^\]", text_of("pyproject.toml"), re.M | re.S)[1]
    ordered = re.findall(r"stretto\.(\w+)", layers)
    assert listed == ordered


def test_the_glossary_has_at_most_25_words():
    arguments = [row[0] for row in table_rows("ARCHITECTURE.md", "Glossary")]
    assert 10 < len(arguments) <= 25
    assert len(set(arguments)) == len(arguments)


# --- code in the documents ---


def test_the_three_lines_of_the_readme_train_a_model():
    (diff,) = blocks("README.md", "diff")
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert len(added) == 3
    three_lines = "\n".join(added)
    torch.manual_seed(0)
    points = torch.randn(256, 2)
    sides = (points[:, 0] > 0).long()
    data, model = TensorDataset(points, sides), nn.Linear(2, 2)
    names = {"torch": torch, "DataLoader": DataLoader, "data": data, "model": model}
    before = nn.functional.cross_entropy(model(points), sides)
    exec(three_lines, names)
    for _epoch in range(5):
        for inputs, targets in names["loader"]:
            loss = nn.functional.cross_entropy(names["model"](inputs), targets)
            names["optimizer"].zero_grad()
            loss.backward()
            names["optimizer"].step()
    assert nn.functional.cross_entropy(model(points), sides) < 0.8 * before
    assert len([line for line in three_lines.splitlines() if line]) == 3


def test_the_parts_that_a_document_shows_run_as_they_stand():
    shown = [code for document in CURRENT for code in blocks(document, "python")]
    parts = [code for code in shown if "run_threads" in code]
    assert parts, "no document shows the parts at work"
    for code in parts:
        exec(code, {})


@pytest.mark.parametrize("document", CURRENT)
def test_every_block_of_python_compiles(document):
    for code in blocks(document, "python"):
        ast.parse(code)


@pytest.mark.parametrize("size", range(1, 8))
def test_the_algorithm_of_the_guide_is_an_all_reduce(size):
    names = {}
    exec(blocks("CONTRIBUTING.md", "python")[0], names)
    verify_allreduce(names["star"](size))
    schedule = pipeline_tensor(names["star"](size), parts=3, width=2)  # as the table has it
    verify_allreduce(schedule)

    def work(transport):
        local = torch.full((7,), 2.0**transport.rank)
        execute(schedule, local, transport)
        return local

    assert all(result.eq(2.0**size - 1).all() for result in run_threads(size, work))


def test_the_line_for_the_table_looks_like_those_in_it():
    line = next(block for block in blocks("CONTRIBUTING.md") if "star" in block)
    table = text_of("src/stretto/collectives/algorithms/__init__.py")
    assert line.replace("star", "doubling") in table
    assert "doubling" in ALLREDUCE
    assert "star" not in ALLREDUCE, "the guide's example has been added: choose another"
