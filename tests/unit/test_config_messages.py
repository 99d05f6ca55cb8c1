import re
from typing import Annotated, Literal

import pytest
from pydantic import Field, field_validator

from stretto.config import Config, load
from stretto.errors import ConfigError
from tests.unit.test_config import NAMED, Layer, Run, Sync

JARGON = re.compile(r"pydantic|Input|validat|discriminator|\btag\b|JSON|Literal|int_type|https?:")


def error_message(file, *overrides, model=Run):
    with pytest.raises(ConfigError) as caught:
        load(model, file, overrides)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert not JARGON.search(message)
    assert all(line.isprintable() for line in message.split("\n"))
    return message


BAD_FILES = {
    "unknown key": (
        NAMED + "[train]\nstesp = 5\n",
        'train.stesp = 5: unknown key; did you mean "steps"? known in train: steps, lr, threads',
    ),
    "unknown key, no similar one": (
        NAMED + "[train]\nqqq = 5\n",
        "train.qqq = 5: unknown key; known in train: steps, lr, threads",
    ),
    "unknown key at the top": (
        NAMED + "verbos = true\n",
        'verbos = true: unknown key; did you mean "verbose"? known: name, path, verbose,',
    ),
    "unknown table": (
        NAMED + "[trian]\nsteps = 5\n",
        'trian.steps = 5: unknown table "trian"; did you mean "train"? known: name,',
    ),
    "key of another kind": (
        NAMED + '[strategy]\nkind = "gossip"\nbucket = 5\n',
        "strategy.bucket = 5: unknown key; known in strategy: kind, every, topology",
    ),
    "text for a whole number": (
        NAMED + '[train]\nsteps = "ten"\n',
        'train.steps = "ten": expected a whole number, at least 1; got text',
    ),
    "fraction for a whole number": (
        NAMED + "[train]\nsteps = 1.5\n",
        "train.steps = 1.5: expected a whole number, at least 1; got a number with a fraction",
    ),
    "truth for a whole number": (
        NAMED + "[train]\nsteps = true\n",
        "train.steps = true: expected a whole number, at least 1; got true or false",
    ),
    "number for text": ("name = 5\n", "name = 5: expected text; got a whole number"),
    "number for a truth": (
        NAMED + "verbose = 1\n",
        "verbose = 1: expected true or false; got a whole number",
    ),
    "number for a path": (
        NAMED + "path = 5\n",
        "path = 5: expected a path as text; got a whole number",
    ),
    "number for a table": (NAMED + "train = 5\n", "train = 5: expected a table; got a whole"),
    "number for a list": (
        NAMED + "bucket_lengths = 5\n",
        "bucket_lengths = 5: expected a list; got a whole number",
    ),
    "number for a mapping": (NAMED + "algorithms = 5\n", "algorithms = 5: expected a table; got"),
    "wrong item of a list": (
        NAMED + 'bucket_lengths = [1, "a"]\n',
        'bucket_lengths.1 = "a": expected a whole number; got text',
    ),
    "wrong entry of a mapping": (
        NAMED + "[algorithms]\nbig = 5\n",
        "algorithms.big = 5: expected text; got a whole number",
    ),
    "too small": (
        NAMED + "[train]\nsteps = 0\n",
        "train.steps = 0: expected a whole number, at least 1",
    ),
    "too large": (
        NAMED + "[train]\nlr = 2.0\n",
        "train.lr = 2.0: expected a number, above 0, at most 1",
    ),
    "too small inside a kind": (
        NAMED + '[strategy]\nkind = "gossip"\nevery = 0\n',
        "strategy.every = 0: expected a whole number, at least 1",
    ),
    "not a number": (NAMED + "[train]\nlr = nan\n", "train.lr = nan: expected a finite number"),
    "unknown choice": (
        NAMED + '[[layers]]\nwidth = 1\nactivation = "rleu"\n',
        'layers.0.activation = "rleu": expected one of "relu", "gelu"; did you mean "relu"?',
    ),
    "unknown choice beside a number": (
        NAMED + '[train]\nthreads = "Aut"\n',
        'train.threads = "Aut": expected a whole number or "auto"; got text; did you mean "auto"?',
    ),
    "unknown kind": (
        NAMED + '[strategy]\nkind = "gosip"\n',
        'strategy.kind = "gosip": unknown kind; did you mean "gossip"? known kinds: sync, gossip',
    ),
    "kind in capitals": (NAMED + '[strategy]\nkind = "SYNC"\n', 'did you mean "sync"?'),
    "unknown kind inside a kind": (
        NAMED + '[strategy]\nkind = "gossip"\n[strategy.topology]\nkind = "rnig"\n',
        'strategy.topology.kind = "rnig": unknown kind; did you mean "ring"? known kinds: ring,',
    ),
    "kind that is no text": (NAMED + "[strategy]\nkind = 5\n", "strategy.kind = 5: unknown kind"),
    "kind in place of the table": (
        NAMED + 'strategy = "gossip"\n',
        'expected a table; got text; did you mean strategy.kind = "gossip"?',
    ),
    "kind missing where there is no default": (
        NAMED + "[backup]\nevery = 3\n",
        "backup.kind is missing; expected one of: sync, gossip",
    ),
    "missing key": ("verbose = true\n", "name is missing; expected text"),
    "missing key of an item": (
        NAMED + '[[layers]]\nactivation = "relu"\n',
        "layers.0.width is missing; expected a whole number",
    ),
    "bad size": (NAMED + '[strategy]\nbucket = "3XB"\n', 'bucket = "3XB": expected a size such as'),
    "a validator's own message": (
        NAMED + "[train]\nsteps = 13\n",
        "train: 13 steps are one too many; take 12",
    ),
    "control characters": (
        NAMED + 'bucket_lengths = "\\u001b[31mred\\n"\n',
        'bucket_lengths = "\\u001b[31mred\\n": expected a list; got text',
    ),
    "control characters in a key": (NAMED + '"\\u001b[31m" = 1\n', '"\\u001b[31m" = 1: unknown'),
    "no value": ("name =\n", "not TOML: invalid value (at line 1, column 7)"),
    "truncated file": ('verbose = true\nname = """a', "(at line 2, column 12)"),
    "nested lists": (NAMED + "bucket_lengths = " + "[" * 250 + "]" * 250, "nested too deeply"),
    "deeply nested lists": (NAMED + "bucket_lengths = " + "[" * 9000, "nested too deeply"),
    "deeply nested tables": (NAMED + f"[{'.'.join('a' * 3000)}]\nb = 1", "nested too deeply"),
}


@pytest.mark.parametrize(("text", "expected"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_gives_a_message_of_one_line(tmp_path, text, expected):
    file = tmp_path / "run.toml"
    file.write_text(text)
    message = error_message(file)
    assert expected in message
    assert "run.toml: " in message
    assert "\n" not in message


BAD_OVERRIDES = {
    "no equals sign": ("steps 5", "'steps 5': no \"=\" in it; write it as table.key=value"),
    "no key": ("=5", "override '=5': '' is not a key"),
    "comment before the key": ("#\nname=5", "'#\\nname' is not a key"),
    "empty part": ("train..steps=5", "'train..steps' is not a key"),
    "not UTF-8": ("name=\udcff", "override 'name=\\udcff': the value is not UTF-8 text"),
    "unknown key": (
        "train.stesp=5",
        'override: train.stesp = 5: unknown key; did you mean "steps"',
    ),
    "unknown table": ("trian.steps=5", 'override: trian.steps = 5: unknown table "trian"; did you'),
    "through a number": (
        "train.steps.x=1",
        "override: train.steps.x = 1: train.steps is not a table; expected a whole number",
    ),
    "through a number or word": (
        "train.threads.x=1",
        'train.threads.x = 1: train.threads is not a table; expected a whole number or "auto"',
    ),
    "through a text": ("name.x.y=1", "name.x.y = 1: name is not a table; expected text"),
    "item that is not there": ("layers.7.width=1", "layers.7.width = 1: layers is not a table"),
    "item after the last": ("layers.2.width=1", "layers.2.width = 1: layers is not a table"),
    "wrong type": ("train.steps=ten", 'override: train.steps = "ten": expected a whole number'),
    "text that looks like a number": ("name=5", "to mean text, quote it: name='\"5\"'"),
    "nothing, without a default": (
        "name=",
        "override: name= unsets a key without a default; expected text; to mean empty text, "
        "quote it: name='\"\"'",
    ),
    "nothing for an unknown key": (
        "train.stesp=",
        'override: train.stesp = "": unknown key; did you mean "steps"',
    ),
    "nothing for an unknown table": ("trian.steps=", 'unknown table "trian"; did you mean "train"'),
    "nothing through a number": ("train.steps.x=", "train.steps is not a table; expected a whole"),
    "nothing for an item": ("layers.1=", 'override: layers.1 = "": expected a table; got text'),
    "nothing for an item that is not there": ("layers.7.width=", "layers is not a table"),
    "unknown kind": ("strategy.kind=gosip", 'override: strategy.kind = "gosip": unknown kind; did'),
}


@pytest.mark.parametrize(("override", "expected"), BAD_OVERRIDES.values(), ids=BAD_OVERRIDES)
def test_a_bad_override_gives_a_message_of_one_line(tmp_path, override, expected):
    file = tmp_path / "run.toml"
    file.write_text(NAMED + "[train]\nsteps = 3\n")
    message = error_message(file, override)
    assert expected in message
    assert "\n" not in message


def test_a_required_key_of_an_item_cannot_be_unset(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(NAMED + "[[layers]]\nwidth = 1\n")
    message = error_message(file, "layers.0.width=")
    expected = "layers.0.width= unsets a key without a default; expected a whole number"
    assert message == f"override: {expected}"


def test_the_hint_about_quotes_is_for_overrides_only(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("name = 5\n")
    assert error_message(file) == "run.toml: name = 5: expected text; got a whole number"


def test_a_kind_with_the_name_of_a_key_is_distinguished():
    class Every(Config):
        kind: Literal["every"] = "every"
        every: int = 1
        steps: int = 1

    class Outer(Config):
        inner: Annotated[Every | Sync, Field(discriminator="kind")] = Every()

    overrides = ("inner.every=3", "inner.steps=many")
    message = error_message(None, *overrides, model=Outer)
    assert message == 'override: inner.steps = "many": expected a whole number; got text'


def test_a_table_in_a_mapping_has_its_own_keys():
    class Shapes(Config):
        shapes: dict[str, Layer]

    message = error_message(None, "shapes.width.width=wide", model=Shapes)
    assert message == 'override: shapes.width.width = "wide": expected a whole number; got text'


def test_a_validators_message_is_made_printable():
    class Rude(Config):
        word: str

        @field_validator("word")
        @classmethod
        def _refuse(cls, word):
            raise ValueError(f"no {word}")

    message = error_message(None, "word=\x1b[31m", model=Rude)
    assert message == 'override: word = "\\u001b[31m": no \\u001b[31m'


def test_all_problems_are_listed_a_line_each(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 0\nlr = 0.5\n")
    message = error_message(file, "train.lr=fast", "bucket_lenghts=[]")
    assert [line.split(": ")[0:2] for line in message.splitlines()] == [
        ["4 problems in the configuration:"],
        ["  run.toml", "name is missing; expected text"],
        ["  run.toml", "train.steps = 0"],
        ["  override", 'train.lr = "fast"'],
        ["  override", "bucket_lenghts = []"],
    ]


def test_all_malformed_overrides_are_listed():
    message = error_message(None, "steps 5", "name=x", "=3")
    assert message.startswith("2 problems")


def test_a_missing_key_without_a_run_file_says_no_run_file():
    assert error_message(None) == "no run file: name is missing; expected text"


@pytest.mark.parametrize("neighbour", ["gossip.toml", "GOSSIP.TOML"])
def test_a_missing_file_is_named_with_its_nearest_neighbour(tmp_path, neighbour):
    (tmp_path / neighbour).write_text(NAMED)
    message = error_message(tmp_path / "gosip.toml")
    assert str(tmp_path / "gosip.toml") in message
    assert message.endswith(f'does not exist; did you mean "{neighbour}"?')


def test_a_missing_folder_is_named(tmp_path):
    message = error_message(tmp_path / "runs" / "a.toml")
    assert message.endswith(f"does not exist; nor does the folder {tmp_path / 'runs'}")


def test_a_directory_is_refused_as_run_file(tmp_path):
    assert error_message(tmp_path) == f"{tmp_path} is a directory; name the run file in it"


def test_an_invalid_file_name_is_refused(tmp_path):
    assert "cannot be read" in error_message(tmp_path / "a\0b")


def test_a_file_that_is_not_utf8_is_refused_with_the_position(tmp_path):
    file = tmp_path / "run.toml"
    file.write_bytes(b'name = "\xff"\n')
    assert (
        error_message(file)
        == f"{file}: not UTF-8 text: byte 8 cannot be read; save the file as UTF-8"
    )


def test_a_long_value_is_truncated(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(NAMED + f'bucket_lengths = "{"a" * 5000}"\n')
    assert len(error_message(file)) < 200
