import pytest

from stretto.checkpoint.folders import (
    clear_leftovers,
    finish_replacements,
    quarantine,
    step_folder_name,
    step_folders,
    step_of,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("step", [0, 7, 99_999_999, 100_000_000, 10**18 - 1])
def test_the_step_is_parsed_from_the_folder_name(tmp_path, step):
    assert step_of(tmp_path / step_folder_name(step)) == step


def test_checkpoints_are_in_order_of_step_beyond_eight_digits(tmp_path):
    for step in (100_000_000, 99_999_999, 5):
        (tmp_path / step_folder_name(step)).mkdir()
    assert [step_of(path) for path in step_folders(tmp_path)] == [5, 99_999_999, 100_000_000]


@pytest.mark.parametrize(
    "name", ["step-1", "step-00000001.tmp-1-2", "step-00000001.damaged-1", "step-0000000x", "x"]
)
def test_other_names_are_not_checkpoints(tmp_path, name):
    (tmp_path / name).mkdir()
    assert step_folders(tmp_path) == []


def test_leftovers_of_newer_generations_are_kept(tmp_path):
    for generation in (1, 2, 3):
        (tmp_path / f"step-00000001.tmp-{generation}-99").mkdir()
    clear_leftovers(tmp_path, generation=2)
    assert names(tmp_path) == ["step-00000001.tmp-3-99"]


def test_an_interrupted_replacement_is_undone(tmp_path):
    (tmp_path / "step-00000001.replaced-1-99").mkdir()
    finish_replacements(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


def test_a_completed_replacement_is_cleaned_up(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001.replaced-1-99").mkdir()
    finish_replacements(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


def test_a_second_damaged_checkpoint_of_a_step_gets_the_next_number(tmp_path):
    for _ in range(2):
        (tmp_path / "step-00000001").mkdir()
        quarantine(tmp_path / "step-00000001")
    assert names(tmp_path) == ["step-00000001.damaged-1", "step-00000001.damaged-2"]


def test_quarantine_of_a_checkpoint_renamed_by_another_rank_is_no_error(tmp_path):
    assert quarantine(tmp_path / "step-00000001") is None
    assert names(tmp_path) == []
