"""Files appear whole or not at all."""

import pytest

from stretto.telemetry.aside import write_aside


def test_missing_folders_are_made(tmp_path):
    write_aside(tmp_path / "a" / "b" / "c.txt", "text")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "text"


def test_nothing_is_left_beside_the_file(tmp_path):
    write_aside(tmp_path / "c.txt", "one")
    write_aside(tmp_path / "c.txt", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["c.txt"]


def test_a_text_that_cannot_be_written_leaves_the_old_file_alone(tmp_path):
    write_aside(tmp_path / "c.txt", "old")
    with pytest.raises(UnicodeEncodeError):
        write_aside(tmp_path / "c.txt", "new \ud800")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
