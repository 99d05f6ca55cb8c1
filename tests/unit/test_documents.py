"""What the documents say is so: paths exist, commands parse, targets are there, code blocks run."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stretto.cli.main import VERBS, build_app
from stretto.comm.algorithms import ALLREDUCE
from stretto.comm.execute import execute
from stretto.comm.local import run_local
from stretto.comm.schedule import pipelined
from stretto.comm.verify import verify_allreduce

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
DECISIONS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "adr").glob("*.md"))
LINKED = (
    *DOCUMENTS,
    "CHANGELOG.md",
    "docs/log.md",
    "docs/launchers.md",
    "docs/training.md",
    "docs/collectives.md",
    "docs/sharding.md",
    "docs/planning.md",
    "docs/gossip.md",
    "docs/virtual.md",
    "docs/studies.md",
    *DECISIONS,
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")
_PATH = re.compile(r"[\w.-]*/[\w./-]*|[\w-]+\.(?:py|md|toml|txt|yaml|json)")
_ABSENT = {"utils.py"}
"""A word that looks like a path of the tree and warns of one."""


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def blocks(document: str, language: str = "") -> list[str]:
    return [body for tag, body in _FENCE.findall(text_of(document)) if tag == language]


def quoted(document: str) -> list[str]:
    return _QUOTED.findall(_FENCE.sub("", text_of(document)))


def command_lines(document: str) -> list[str]:
    """Return what stands in blocks without a language and between backticks, comments cut off."""
    lines = [line for block in blocks(document) for line in block.splitlines()]
    return [line.partition(" # ")[0].strip() for line in [*lines, *quoted(document)]]


def named_paths(document: str) -> list[str]:
    words = (word for text in quoted(document) for word in text.split())
    paths = {word for word in words if _PATH.fullmatch(word)} - _ABSENT
    return sorted(path for path in paths if not path.startswith(".venv/"))  # made by `make`


def stretto_commands(line: str) -> Iterator[list[str]]:
    """Yield the arguments of ``stretto`` in a line, and of the one that a lab runs."""
    words = shlex.split(line)
    if words[:1] != ["stretto"] or len(words) == 1:
        return
    yield words[1:]
    if "--" in words:
        yield from stretto_commands(shlex.join(words[words.index("--") + 1 :]))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_that_is_named_exists(document):
    paths = named_paths(document)
    homes = (ROOT, ROOT / "src" / "stretto")
    assert [path for path in paths if not any((home / path).exists() for home in homes)] == []
    assert paths, "no path was found: is the search broken?"


@pytest.mark.parametrize("document", LINKED)
def test_every_link_into_the_tree_leads_somewhere(document):
    folder = (ROOT / document).parent
    assert [link for link in _LINK.findall(text_of(document)) if not (folder / link).exists()] == []


def test_the_tour_has_six_files_and_each_says_what_it_is():
    tour = text_of("README.md").partition("## The tour")[2].partition("\n## ")[0]
    stops = re.findall(r"^(\d)\. `([^`]+)` - \S", tour, re.MULTILINE)
    assert [number for number, _ in stops] == list("123456")
    assert len({path for _, path in stops}) == 6
    dumb = [path for _, path in stops if not ast.get_docstring(ast.parse(text_of(path)))]
    assert dumb == []


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md"])
def test_every_make_target_that_is_named_exists(document):
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    named = {line.split()[1] for line in command_lines(document) if re.match(r"make [a-z]", line)}
    assert named <= targets


def test_the_quick_start_sets_up_with_two_commands():
    start = text_of("README.md").partition("## Quick start")[2]
    lines = _FENCE.search(start)[2].splitlines()
    assert [line.partition("#")[0].strip() for line in lines] == ["make demo", "make test"]


@pytest.mark.parametrize("document", [*LINKED[:13], "examples/text.toml", "examples/images.toml"])
def test_every_stretto_command_parses(document):
    app = build_app()
    lines = command_lines(document)
    if document.endswith(".toml"):
        lines = [line.removeprefix("#").strip() for line in text_of(document).splitlines()]
    for line in lines:
        for words in stretto_commands(line) if line.startswith("stretto ") else ():
            # A form is meant: what stands in brackets may be left out, a bare verb is its name.
            words = [word for word in words if "[" not in word and "]" not in word]
            if words in ([verb] for verb in VERBS):
                continue
            app.parse_args(words, exit_on_error=False, print_error=False)


def test_the_readme_shows_every_verb():
    shown = {words[0] for line in command_lines("README.md") for words in stretto_commands(line)}
    assert set(VERBS) - {"demo"} <= shown
    assert "make demo" in command_lines("README.md")


def test_the_readme_is_at_most_160_lines():
    assert len(text_of("README.md").splitlines()) <= 160


@pytest.mark.parametrize("document", DECISIONS)
def test_a_decision_says_why_what_follows_and_what_was_rejected(document):
    text, number = text_of(document), Path(document).name[:4]
    assert re.match(rf"# {number} \S", text)
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == ["Context", "Decision", "Consequences", "Rejected"]


def test_decisions_are_numbered_without_a_gap():
    numbers = [int(Path(document).name[:4]) for document in DECISIONS]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("document", LINKED)
def test_documents_are_plain_ascii(document):
    assert text_of(document).isascii()


def test_the_three_lines_of_the_readme_train_a_model():
    three_lines = next(code for code in blocks("README.md", "python") if "distribute" in code)
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


def test_the_parts_of_the_readme_run_as_they_stand():
    code = next(code for code in blocks("README.md", "python") if "run_local" in code)
    exec(code, {})


@pytest.mark.parametrize("size", range(1, 8))
def test_the_algorithm_of_the_guide_is_an_all_reduce(size):
    names = {}
    exec(blocks("CONTRIBUTING.md", "python")[0], names)
    verify_allreduce(names["star"](size))
    schedule = pipelined(names["star"](size), parts=3, width=2)  # as the table has it
    verify_allreduce(schedule)

    def work(channel):
        mine = torch.full((7,), 2.0**channel.rank)
        execute(schedule, mine, channel)
        return mine

    assert all(result.eq(2.0**size - 1).all() for result in run_local(size, work))


def test_the_line_for_the_table_looks_like_those_in_it():
    line = next(block for block in blocks("CONTRIBUTING.md") if "star" in block)
    table = text_of("src/stretto/comm/algorithms/__init__.py")
    assert line.replace("star", "doubling") in table
    assert "doubling" in ALLREDUCE
    assert "star" not in ALLREDUCE, "the guide's example has been added: choose another"
