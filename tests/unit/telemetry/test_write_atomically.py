"""`write_atomically` leaves whole files only."""

import pytest

from stretto.telemetry.sinks import write_atomically


def test_missing_folders_are_created(tmp_path):
    write_atomically(tmp_path / "a" / "b" / "c.txt", "text")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "text"


def test_no_temporary_file_remains(tmp_path):
    write_atomically(tmp_path / "c.txt", "one")
    write_atomically(tmp_path / "c.txt", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["c.txt"]


def test_a_text_that_cannot_be_written_leaves_the_old_file_alone(tmp_path):
    write_atomically(tmp_path / "c.txt", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "c.txt", "new \ud800")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
