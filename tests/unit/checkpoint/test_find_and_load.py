"""Another run's checkpoint: found by three kinds of path, and nothing is changed there."""

import pytest

from stretto.checkpoint import find_and_load, save_checkpoint
from stretto.errors import CheckpointError
from tests.unit.checkpoint.saver import assert_same, state_at


@pytest.fixture
def run(tmp_path):
    for step in (1, 2):
        save_checkpoint(tmp_path / "checkpoints", state_at(step), generation=0)
    return tmp_path


def damage(run, step):
    file = run / "checkpoints" / f"step-{step:08d}" / "tensors-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("path_inside", ["", "checkpoints"])
def test_for_a_folder_its_newest_checkpoint_is_loaded(path_inside, run):
    path, state = find_and_load(run / path_inside, log=pytest.fail)
    assert path == run / "checkpoints" / "step-00000002"
    assert_same(state, state_at(2))


def test_for_the_folder_of_one_checkpoint_that_one_is_loaded(run):
    _, state = find_and_load(run / "checkpoints" / "step-00000001", log=pytest.fail)
    assert_same(state, state_at(1))


def test_a_damaged_checkpoint_is_skipped_and_not_renamed(run):
    damage(run, 2)
    names, reported = sorted(run.rglob("*")), []
    _, state = find_and_load(run, log=reported.append)
    assert_same(state, state_at(1))
    assert sorted(run.rglob("*")) == names
    assert len(reported) == 1
    assert "step-00000002" in reported[0]


def test_a_damaged_checkpoint_given_by_name_is_not_replaced_by_another(run):
    damage(run, 2)
    with pytest.raises(CheckpointError, match="digest"):
        find_and_load(run / "checkpoints" / "step-00000002", log=pytest.fail)


def test_a_folder_with_only_damaged_checkpoints_is_refused(run):
    damage(run, 1)
    damage(run, 2)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        find_and_load(run, log=lambda line: None)


@pytest.mark.parametrize(
    ("path_inside", "reason"), [("nowhere", "is not a folder"), ("", "holds no")]
)
def test_the_error_for_a_path_without_checkpoints_says_what_was_expected(
    path_inside, reason, tmp_path
):
    with pytest.raises(CheckpointError, match=f"{reason}.*name a run's folder"):
        find_and_load(tmp_path / path_inside, log=pytest.fail)
