"""Another run's checkpoint: found under three kinds of name, and nothing there is touched."""

import pytest

from stretto.checkpoint import load_at, save
from stretto.errors import CheckpointError
from tests.unit.checkpoint.saver import assert_same, state_at


@pytest.fixture
def run(tmp_path):
    for step in (1, 2):
        save(tmp_path / "checkpoints", state_at(step), generation=0)
    return tmp_path


def damage(run, step):
    file = run / "checkpoints" / f"step-{step:08d}" / "tensors-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("place", ["", "checkpoints"])
def test_a_folder_means_its_newest_checkpoint(place, run):
    path, state = load_at(run / place, log=pytest.fail)
    assert path == run / "checkpoints" / "step-00000002"
    assert_same(state, state_at(2))


def test_the_folder_of_one_checkpoint_means_that_one(run):
    _, state = load_at(run / "checkpoints" / "step-00000001", log=pytest.fail)
    assert_same(state, state_at(1))


def test_a_damaged_checkpoint_is_passed_over_and_left_where_it_is(run):
    damage(run, 2)
    names, told = sorted(run.rglob("*")), []
    _, state = load_at(run, log=told.append)
    assert_same(state, state_at(1))
    assert sorted(run.rglob("*")) == names
    assert len(told) == 1
    assert "step-00000002" in told[0]


def test_no_other_checkpoint_stands_in_for_a_damaged_one_that_was_named(run):
    damage(run, 2)
    with pytest.raises(CheckpointError, match="digest"):
        load_at(run / "checkpoints" / "step-00000002", log=pytest.fail)


def test_a_folder_with_only_damaged_checkpoints_is_refused(run):
    damage(run, 1)
    damage(run, 2)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        load_at(run, log=lambda line: None)


@pytest.mark.parametrize(("place", "reason"), [("nowhere", "is not a folder"), ("", "holds no")])
def test_a_place_without_checkpoints_is_told_what_was_expected(place, reason, tmp_path):
    with pytest.raises(CheckpointError, match=f"{reason}.*name a run's folder"):
        load_at(tmp_path / place, log=pytest.fail)
