"""The field's own words: no name or sentence of the tree uses a word that was replaced.

A *text* pattern is searched in whole files, a *name* pattern in Python identifiers only, because
the same spelling is an ordinary word elsewhere ("an event of a run", "two micro-batches apart").
"""

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = {
    "fusion": r"\bfusion\w*",
    "carrier": r"\bcarriers?\b",
    "parcel": r"\bparcels?\b",
    "courier": r"\bcouriers?\b",
    "errand": r"\berrands?\b",
    "leg": r"\blegs?\b",
    "carriage": r"\bcarriages?\b",
    "regather": r"\bregather\w*",
    "land, landing, intake": r"\bland(s|ed|ing|ings)?\b|\bintake\b",
    "settle, unsettle": r"\b(un)?settl(e|es|ed|ing)\b",
    "lay aside, take back": r"\bl(ay|ays|aid) aside\b|\bt(ake|akes|aken|ook) back\b",
    "spread_from_rank_0_": r"spread_from_rank_0_",
    "judge": r"\bjudg\w+",
    "pulse": r"\bpulses?\b",
    "beat": r"\bbeats?\b",
    "roll call, meeting": r"\broll[ -]call\b|\bmeetings?\b|\bmeets?\b|\bmet\b",
    "seat": r"\bseats?\b|take_seat",
    "loose": r"\bloose(ly)?\b",
    "undoable": r"\bundoable\b",
    "take_over_": r"take_over_|\bt(ake|akes|aken|ook) over\b",
    "budget": r"\bbudgets?\b",
    "contender": r"\bcontenders?\b",
    "party": r"\bpart(y|ies)\b",
    "learner": r"\blearners?\b",
    "in_any_order": r"in_any_order",
    "bad_limit": r"\bbad_limit\b",
    "silence_s": r"\bsilence_s\b",
    "scratch": r"\bscratch\b",
    "rooms": r"\brooms\b",
    "aside": r"\baside\b",
    "let go": r"\blet(s|ting)? go\b|let_go",
    "dispatcher": r"\bdispatchers?\b",
    "ledger": r"\bledgers?\b",
    "own models": r"\bown models?\b|own_models",
    "own_state": r"\bown_state\b",
    "culprit": r"\bculprits?\b",
    "watchman": r"\bwatchm[ae]n\b",
    "told, heard": r"\btold\b|\bheard\b",
    "door, visit": r"\bdoors?\b|\bvisits?\b|\bvisited\b|\bvisiting\b",
    "rhythm, toll": r"\brhythms?\b|\btolls?\b",
    "rehearsal": r"\brehears\w+",
    "stand_in": r"stand_in\b",
    "take_account": r"\btake_account\b",
    "who waits in a circle": r"waits? in a circle",
}
NAME = {
    "cuts": r"cuts|_cuts|bucket_cuts",
    "channel": r"_?channels?_?|\w*Channel",
    "pending, flight": r"_?pending|Pending|_?flights?|Flight",
    "post": r"_?post|Post",
    "room": r"_?rooms?|_?\w*_room",
    "turns": r"_?turns|Turns",
    "marks": r"_?marks",
    "sound": r"_?sound",
    "verdict, judgement": r"Verdict|leave_verdict|read_verdict|judgement",
    "Watch": r"_?watch|Watch",
    "meet": r"_?meet|Met|Meeting|_?meeting",
    "apart": r"_?apart",
    "origin": r"_?origins?",
    "remarks": r"_?remarks?",
    "fresh": r"fresh",
    "line, place (pricing)": r"Line|Place|_?place",
    "talk, told": r"Talk|_?talks?|Told",
    "outline, alike": r"_?outlines?|Outline|Alike|_?alike",
    "charge": r"_?charge|Charge",
    "relaxed": r"relaxed|Relaxation",
    "choosing, fitting, ordering": r"_?choosing|Choosing|fitting|trimming|linking|ordering",
    "clock, pace": r"Clock|Pace|_?pace",
    "options, reach": r"_?reach|Reach|Option",
    "subject, known, wanted": r"_?subject|Subject|_?known|Known|_?wanted|Wanted",
    "variants": r"Variant",
    "stack": r"Stack",
    "book, cells": r"Book|_?book|Cell",
    "share": r"Share|step_share",
    "alone": r"_?alone",
    "account": r"Account|_?account",
    "stretch, piece": r"_?stretch(es)?|Stretch|Piece",
    "act, event of adpsgd": r"_?act|Act",
    "words": r"_?words",
}
"""The same, of whole identifiers."""
EXEMPT = {
    "tests/unit/test_language.py",
    "src/stretto/renamed.py",
    "tests/unit/test_renamed.py",
    "tests/golden/old_runs/exact/run.toml",
    "tests/golden/old_runs/gossip/run.toml",
}
"""This table, the aliases of old names, and what tests that old names still work."""
ALLOWED: dict[tuple[str, str], str] = {
    ("src/stretto/__init__.py", "settle, unsettle"): "the alias stretto.settle",
    ("tests/multi/test_old_runs.py", "silence_s"): "the warning about an old run file",
    ("tests/unit/cli/test_plan.py", "budget"): "the old JSON key beside the new one",
    ("tests/multi/browser.py", "budget"): "an option of Chromium",
    ("src/stretto/cli/slurm.py", "account"): "a Slurm account",
    ("src/stretto/launch/slurm.py", "account"): "a Slurm account",
    ("tests/unit/launch/test_slurm.py", "account"): "a Slurm account",
    ("src/stretto/models/alexnet_vgg.py", "channel"): "channels of an image",
    ("src/stretto/models/cnn.py", "channel"): "channels of an image",
    ("src/stretto/models/resnet.py", "channel"): "channels of an image",
    ("tests/laws/test_models.py", "channel"): "channels of an image",
}
"""(path, row) -> why the word is right there."""


@cache
def files() -> list[Path]:
    """Return the files that people read; diaries of decisions and experiments keep their words."""
    found = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
    for folder in ("src", "tests", "examples", "benchmarks", "tools"):
        found += [p for p in (ROOT / folder).rglob("*.py") if "records" not in p.parts]
        found += (ROOT / folder).rglob("*.toml")
    found += [p for p in (ROOT / "docs").rglob("*.md") if "adr" not in p.parts]
    return sorted(p for p in found if p.name != "log.md" and p.exists())


@cache
def names_in(path: Path) -> dict[str, int]:
    """Return the identifiers of a Python file with the first line of each."""
    if path.suffix != ".py":
        return {}
    found: dict[str, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            found.setdefault(token.string, token.start[0])
    return found


@cache
def uses(path: Path) -> list[tuple[str, str]]:
    """Return (row, where and what) for every replaced word in ``path``."""
    place = str(path.relative_to(ROOT))
    if place in EXEMPT:
        return []
    found = []
    text = path.read_text()
    lines = text.splitlines()
    for row, pattern in TEXT.items():
        expression = re.compile(pattern, re.IGNORECASE)
        if not expression.search(text):  # most words are in no line at all
            continue
        hits = [number for number, line in enumerate(lines, 1) if expression.search(line)]
        found += [(row, f"{place}:{n}: {lines[n - 1].strip()[:90]}") for n in hits]
    for row, pattern in NAME.items():
        expression = re.compile(pattern)
        found += [
            (row, f"{place}:{line}: {name}")
            for name, line in names_in(path).items()
            if expression.fullmatch(name)
        ]
    return [(row, where) for row, where in found if (place, row) not in ALLOWED]


@pytest.mark.parametrize("row", [*TEXT, *NAME])
def test_a_replaced_word_is_nowhere(row):
    found = [where for path in files() for r, where in uses(path) if r == row]
    assert found == []


def test_every_exception_is_still_needed():
    for place, row in ALLOWED:
        path = ROOT / place
        pattern = TEXT.get(row)
        if pattern:
            assert re.search(pattern, path.read_text(), re.IGNORECASE), (place, row)
        else:
            assert any(re.fullmatch(NAME[row], name) for name in names_in(path)), (place, row)


def public_classes() -> dict[str, list[str]]:
    found = defaultdict(list)
    for path in sorted((ROOT / "src" / "stretto").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(ROOT)))
    return dict(found)


TWICE: dict[str, str] = {}
"""Public class names that two modules define, with the reason."""


def test_no_class_name_means_two_things():
    twice = {name for name, places in public_classes().items() if len(places) > 1}
    assert twice == set(TWICE)
    assert len(TWICE) <= 5
