from concurrent.futures import ThreadPoolExecutor

import pytest

from stretto.checkpoint import (
    current_generation,
    load_newest,
    next_generation,
    save_checkpoint,
    tensor_files,
)
from stretto.checkpoint import folders as generation
from stretto.errors import CheckpointError
from tests.unit.checkpoint.saver import state_at


def test_a_run_that_never_started_has_generation_zero(tmp_path):
    assert current_generation(tmp_path / "nowhere") == 0


def test_each_start_gets_a_larger_generation(tmp_path):
    run_dir = tmp_path / "run"
    assert [next_generation(run_dir) for _ in range(3)] == [1, 2, 3]
    assert current_generation(run_dir) == 3


def test_generations_are_compared_as_numbers_not_as_strings(tmp_path):
    (tmp_path / "generations").mkdir()
    (tmp_path / "generations" / "999999").touch()
    (tmp_path / "generations" / "notes.txt").touch()
    assert next_generation(tmp_path) == 1_000_000
    assert next_generation(tmp_path) == 1_000_001


def test_simultaneous_starts_never_share_a_generation(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: next_generation(tmp_path), range(40)))
    assert sorted(taken) == list(range(1, 41))


def test_a_generation_created_by_another_start_meanwhile_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "current_generation", lambda _: 0)
    assert [next_generation(tmp_path) for _ in range(3)] == [1, 2, 3]


def test_a_run_folder_that_cannot_be_created_is_a_checkpoint_error(tmp_path):
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(CheckpointError, match="cannot create a generation"):
        next_generation(tmp_path / "run")


def test_a_stale_generation_writes_nothing(tmp_path):
    old, new = next_generation(tmp_path), next_generation(tmp_path)
    folder = tmp_path / "checkpoints"
    save_checkpoint(folder, state_at(1), generation=new)
    with pytest.raises(CheckpointError, match=r"generation 1 may not write.*generation 2"):
        save_checkpoint(folder, state_at(2), generation=old)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


def test_a_new_generation_during_a_save_prevents_its_commit(tmp_path, monkeypatch):
    ours, folder = next_generation(tmp_path), tmp_path / "checkpoints"
    save_checkpoint(folder, state_at(1), generation=ours)
    pack = tensor_files.pack_tensors

    def pack_while_another_starts(tensors):
        next_generation(tmp_path)
        return pack(tensors)

    monkeypatch.setattr(tensor_files, "pack_tensors", pack_while_another_starts)
    with pytest.raises(CheckpointError, match="the run was restarted as generation"):
        save_checkpoint(folder, state_at(2), generation=ours)
    assert load_newest(folder, log=pytest.fail).step == 1
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
