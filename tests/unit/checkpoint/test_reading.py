"""Every kind of damage to a checkpoint on disk is detected, and the one before it is loaded."""

import os
import random
import shutil

import pytest
import torch

from stretto.checkpoint import (
    CheckpointState,
    load_checkpoint,
    load_newest,
    save_checkpoint,
    verify_checkpoint,
)
from stretto.checkpoint import tensor_files as shards
from stretto.checkpoint.manifest import manifest_digest_line
from stretto.errors import CheckpointError
from tests.unit.checkpoint.saver import assert_same, state_at

SHARD = "tensors-00000.safetensors"


def silent(_: str) -> None:
    pass


def edit_manifest(path, old, new):
    manifest = path / "manifest.json"
    text = manifest.read_text()
    assert old in text
    manifest.write_text(text.replace(old, new, 1))


def edit_and_update_digest(path, old, new):
    edit_manifest(path, old, new)
    (path / "manifest.sha256").write_bytes(
        manifest_digest_line((path / "manifest.json").read_bytes())
    )


def truncate(file):
    os.truncate(file, file.stat().st_size - 1)


def append(file):
    with file.open("ab") as handle:
        handle.write(b"\0")


def swap(one, other):
    temporary = one.with_name("temporary")
    one.rename(temporary)
    other.rename(one)
    temporary.rename(other)


def replace_by_link(file):
    target = file.parent.parent / "elsewhere"
    file.rename(target)
    file.symlink_to(target)


def replace_by_folder(file):
    file.unlink()
    file.mkdir()


def replace_by_pipe(file):
    file.unlink()
    os.mkfifo(file)


def swap_folder_for_link(path):
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


DAMAGES = {
    "truncated shard": lambda path: truncate(path / SHARD),
    "truncated manifest": lambda path: truncate(path / "manifest.json"),
    "truncated seal": lambda path: truncate(path / "manifest.sha256"),
    "empty shard": lambda path: os.truncate(path / SHARD, 0),
    "longer shard": lambda path: append(path / SHARD),
    "longer manifest": lambda path: append(path / "manifest.json"),
    "longer seal": lambda path: append(path / "manifest.sha256"),
    "missing shard": lambda path: (path / SHARD).unlink(),
    "missing manifest": lambda path: (path / "manifest.json").unlink(),
    "missing seal": lambda path: (path / "manifest.sha256").unlink(),
    "extra file": lambda path: (path / "tensors-00009.safetensors").touch(),
    "extra folder": lambda path: (path / "more").mkdir(),
    "swapped shards": lambda path: swap(path / SHARD, path / "tensors-00001.safetensors"),
    "shard of another step": lambda path: shutil.copy(
        path.with_name("step-00000001") / SHARD, path / SHARD
    ),
    "manifest of another step": lambda path: [
        shutil.copy(path.with_name("step-00000001") / name, path / name)
        for name in ("manifest.json", "manifest.sha256")
    ],
    "files of another step": lambda path: shutil.copytree(
        path.with_name("step-00000001"), path, dirs_exist_ok=True
    ),
    "edited manifest": lambda path: edit_manifest(path, '"seed": 7', '"seed": 8'),
    "edited shape": lambda path: edit_and_update_digest(path, "64", "32"),
    "edited dtype": lambda path: edit_and_update_digest(path, "F32", "I32"),
    "edited name": lambda path: edit_and_update_digest(path, '"model/w"', '"model/v"'),
    "absolute name": lambda path: edit_and_update_digest(
        path, f'"{SHARD}": {{', '"/etc/passwd": {'
    ),
    "climbing name": lambda path: edit_and_update_digest(
        path, f'"file": "{SHARD}"', '"file": "../x"'
    ),
    "doubled key": lambda path: edit_and_update_digest(path, '"step"', '"generation": 0,"step"'),
    "nested manifest": lambda path: edit_and_update_digest(path, "7", "[" * 100 + "]" * 100),
    "deep manifest": lambda path: edit_and_update_digest(path, "7", "[" * 5000 + "]" * 5000),
    "link for a shard": lambda path: replace_by_link(path / SHARD),
    "link for the manifest": lambda path: replace_by_link(path / "manifest.json"),
    "folder for a shard": lambda path: replace_by_folder(path / SHARD),
    "pipe for a shard": lambda path: replace_by_pipe(path / SHARD),
    "link for the folder": swap_folder_for_link,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_FILE_BYTES", 256)
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        save_checkpoint(folder, state_at(step), generation=0)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported_and_quarantined_and_the_previous_checkpoint_is_loaded(folder, damage):
    newest = folder / "step-00000002"
    DAMAGES[damage](newest)
    complaints = []
    found = load_newest(folder, log=complaints.append)
    assert_same(found, state_at(1))
    assert len(complaints) == 1
    assert str(newest) in complaints[0]
    assert "renamed to step-00000002.damaged-1" in complaints[0]
    assert (folder / "step-00000002.damaged-1").exists()
    assert not newest.exists()


@pytest.mark.parametrize("damage", DAMAGES)
def test_loading_a_damaged_checkpoint_by_name_is_refused_and_renames_nothing(folder, damage):
    newest = folder / "step-00000002"
    DAMAGES[damage](newest)
    with pytest.raises(CheckpointError, match="step-00000002"):
        load_checkpoint(newest)
    assert newest.exists()


def test_every_flipped_bit_is_detected(folder):
    path = folder / "step-00000002"
    files = sorted(path.iterdir())
    assert len(files) == 4
    chance = random.Random(3)
    for file in files:
        whole = file.read_bytes()
        for position in sorted(chance.sample(range(8 * len(whole)), 75)):
            damaged = bytearray(whole)
            damaged[position // 8] ^= 1 << position % 8
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                load_checkpoint(path)
        file.write_bytes(whole)
    assert_same(load_checkpoint(path), state_at(2))


def test_verify_accepts_an_intact_checkpoint_and_refuses_a_changed_one(folder):
    path = folder / "step-00000002"
    verify_checkpoint(path)
    (path / SHARD).write_bytes((path / SHARD).read_bytes()[::-1])
    with pytest.raises(CheckpointError, match="digest"):
        verify_checkpoint(path)


def test_if_all_are_damaged_each_is_reported_and_nothing_is_loaded(folder):
    for step in (1, 2):
        truncate(folder / f"step-{step:08d}" / SHARD)
    complaints = []
    assert load_newest(folder, log=complaints.append) is None
    assert len(complaints) == 2


def test_a_damaged_checkpoint_is_tried_only_once(folder):
    truncate(folder / "step-00000002" / SHARD)
    load_newest(folder, log=silent)
    assert_same(load_newest(folder, log=pytest.fail), state_at(1))


def test_a_folder_that_does_not_exist_holds_no_checkpoint(tmp_path):
    assert load_newest(tmp_path / "nowhere", log=pytest.fail) is None


def test_a_checkpoint_that_does_not_exist_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        load_checkpoint(tmp_path / "nowhere")


def test_a_half_written_checkpoint_is_ignored(folder):
    (folder / "step-00000003.tmp-0-1").mkdir()
    assert_same(load_newest(folder, log=pytest.fail), state_at(2))


def test_a_checkpoint_of_a_newer_version_stops_the_load_and_is_not_renamed(folder):
    path = folder / "step-00000002"
    edit_and_update_digest(path, '"schema_version": 1', '"schema_version": 2')
    with pytest.raises(CheckpointError, match="schema version 2"):
        load_newest(folder, log=pytest.fail)
    assert path.exists()


def test_an_error_of_the_reader_renames_no_checkpoint(folder, monkeypatch):
    def refuse(*_args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match="nothing was renamed"):
        load_newest(folder, log=pytest.fail)
    monkeypatch.undo()
    assert (folder / "step-00000002").exists()


def test_a_manifest_beyond_the_limit_is_not_read(folder, monkeypatch):
    os.truncate(folder / "step-00000002" / "manifest.json", 10**12)  # sparse: costs nothing
    with pytest.raises(CheckpointError, match="1000000000000 bytes"):
        load_checkpoint(folder / "step-00000002")


def test_loaded_tensors_are_writable_copies(folder):
    path = folder / "step-00000002"
    for tensor in load_checkpoint(path).tensors.values():
        tensor.fill_(9)
    assert_same(load_checkpoint(path), state_at(2))


def test_tensors_are_found_under_their_owner():
    state = CheckpointState(1, {"model/a/b": torch.ones(1), "models/c": torch.ones(1)}, {})
    assert list(state.tensors_under("model")) == ["a/b"]
