import os
import shutil
import subprocess

import pytest
import torch

from stretto.checkpoint import CheckpointState, load_checkpoint, load_newest, save_checkpoint
from stretto.checkpoint import save_load as writing
from stretto.checkpoint import tensor_files as shards
from stretto.errors import CheckpointError
from tests.unit.checkpoint.saver import assert_same, state_at


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "checkpoints"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def spoil(path):
    with (path / "tensors-00000.safetensors").open("r+b") as file:
        file.truncate(20)


def test_the_result_of_a_save_has_its_path_and_size(folder):
    saved = save_checkpoint(folder, state_at(10), generation=0)
    assert saved.path == folder / "step-00000010"
    assert saved.num_bytes == sum(file.stat().st_size for file in saved.path.iterdir())
    assert saved.seconds > 0


def test_the_digest_file_can_be_checked_with_sha256sum(folder):
    saved = save_checkpoint(folder, state_at(1), generation=0)
    subprocess.run(
        ["sha256sum", "--check", "--strict", "manifest.sha256"],
        cwd=saved.path,
        check=True,
        capture_output=True,
    )


def test_only_the_newest_checkpoints_are_kept(folder):
    for step in range(1, 6):
        save_checkpoint(folder, state_at(step), generation=0, keep=3)
    assert names(folder) == ["step-00000003", "step-00000004", "step-00000005"]


def test_keep_one_leaves_one(folder):
    for step in (1, 2):
        save_checkpoint(folder, state_at(step), generation=0, keep=1)
    assert names(folder) == ["step-00000002"]


def test_the_last_valid_older_checkpoint_is_kept_if_newer_ones_are_damaged(folder):
    for step in (1, 2):
        save_checkpoint(folder, state_at(step), generation=0)
    spoil(folder / "step-00000002")
    save_checkpoint(folder, state_at(3), generation=0)
    assert names(folder) == ["step-00000001", "step-00000002", "step-00000003"]
    spoil(folder / "step-00000003")
    assert load_newest(folder, log=lambda _: None).step == 1


def test_such_a_checkpoint_is_deleted_once_a_newer_valid_one_exists(folder):
    for step in (1, 2):
        save_checkpoint(folder, state_at(step), generation=0)
    spoil(folder / "step-00000002")
    for step in (3, 4):
        save_checkpoint(folder, state_at(step), generation=0)
    assert names(folder) == ["step-00000003", "step-00000004"]


def test_later_steps_survive_the_save_of_an_earlier_one(folder):
    save_checkpoint(folder, state_at(9), generation=0)
    save_checkpoint(folder, state_at(2), generation=0, keep=1)
    assert names(folder) == ["step-00000002", "step-00000009"]


def test_a_repeated_step_replaces_its_checkpoint(folder):
    first = state_at(5)
    save_checkpoint(folder, first, generation=0)
    again = CheckpointState(5, {"model/w": torch.tensor([-1.0])}, {"seed": 8})
    save_checkpoint(folder, again, generation=1)
    assert names(folder) == ["step-00000005"]
    assert_same(load_checkpoint(folder / "step-00000005"), again)


def test_a_reader_that_restores_the_old_checkpoint_does_not_stop_a_replacement(folder, monkeypatch):
    save_checkpoint(folder, state_at(5), generation=0)
    rename, meddled = type(folder).rename, []

    def rename_then_meddle(source, target):
        result = rename(source, target)
        if ".replaced-" in str(target) and not meddled:
            meddled.append(target)
            rename(target, source)
        return result

    monkeypatch.setattr(type(folder), "rename", rename_then_meddle)
    again = CheckpointState(5, {"model/w": torch.tensor([-1.0])}, {})
    save_checkpoint(folder, again, generation=0)
    assert meddled
    assert names(folder) == ["step-00000005"]
    assert_same(load_checkpoint(folder / "step-00000005"), again)


def test_leftovers_of_a_crash_are_cleared_by_the_next_save(folder):
    (folder / "step-00000001.tmp-1-1").mkdir(parents=True)
    save_checkpoint(folder, state_at(2), generation=2)
    assert names(folder) == ["step-00000002"]


def test_a_state_is_split_into_files_of_bounded_size(folder, monkeypatch):
    monkeypatch.setattr(shards, "MAX_FILE_BYTES", 100)
    tensors = {f"model/{i}": torch.full((10,), float(i)) for i in range(5)}
    tensors["model/large"] = torch.zeros(100)
    saved = save_checkpoint(folder, CheckpointState(1, tensors, {}), generation=0)
    files = [file for file in names(saved.path) if file.startswith("tensors-")]
    assert files == [f"tensors-{i:05d}.safetensors" for i in range(4)]
    assert_same(load_checkpoint(saved.path), CheckpointState(1, tensors, {}))


def test_a_state_without_tensors_can_be_saved(folder):
    saved = save_checkpoint(folder, CheckpointState(0, {}, {"note": "nothing yet"}), generation=0)
    assert_same(load_checkpoint(saved.path), CheckpointState(0, {}, {"note": "nothing yet"}))


def test_too_little_space_is_reported_with_both_sizes_before_anything_is_written(
    folder, monkeypatch
):
    save_checkpoint(folder, state_at(1), generation=0)
    usage = shutil.disk_usage(folder)._replace(free=1234)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage)
    big = CheckpointState(2, {"model/w": torch.zeros(10**6)}, {})
    with pytest.raises(CheckpointError, match=r"needs 4\d{6} bytes.*has 1234 free"):
        save_checkpoint(folder, big, generation=0)
    assert names(folder) == ["step-00000001"]


def test_the_required_space_is_sufficient(folder, monkeypatch):
    tensors = {f"model/layer.{i}.weight": torch.zeros(3) for i in range(2000)}
    usage = shutil._ntuple_diskusage(0, 0, 0)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="needs") as refused:
        save_checkpoint(folder, CheckpointState(1, tensors, {"words": ["x"] * 1000}), generation=0)
    needed_bytes = int(str(refused.value).split("needs ")[1].split()[0])
    monkeypatch.undo()
    saved = save_checkpoint(
        folder, CheckpointState(1, tensors, {"words": ["x"] * 1000}), generation=0
    )
    assert saved.num_bytes <= needed_bytes


@pytest.fixture
def tiny_disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("a disk to fill is mounted by root only")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk to fill can be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_during_a_save_loses_only_the_new_checkpoint(tiny_disk, monkeypatch):
    folder = tiny_disk / "checkpoints"
    save_checkpoint(folder, state_at(1), generation=0)
    plenty = shutil.disk_usage("/")._replace(free=10**12)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: plenty)
    big = CheckpointState(2, {"model/w": torch.zeros(10**6)}, {})
    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(folder, big, generation=0)
    assert names(folder) == ["step-00000001"]
    assert_same(load_newest(folder, log=pytest.fail), state_at(1))


def test_a_full_disk_is_detected_before_writing(tiny_disk):
    with pytest.raises(CheckpointError, match="nothing was written"):
        save_checkpoint(
            tiny_disk / "checkpoints",
            CheckpointState(1, {"w": torch.zeros(10**6)}, {}),
            generation=0,
        )


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        (CheckpointState(-1, {}, {}), "step must be between"),
        (CheckpointState(10**18, {}, {}), "step must be between"),
        (
            CheckpointState(1, {"w": torch.zeros(1, dtype=torch.complex128)}, {}),
            "'w' is torch.complex128",
        ),
        (CheckpointState(1, {"w": torch.eye(2).to_sparse()}, {}), "torch.sparse_coo"),
        (CheckpointState(1, {"w": torch.zeros(1, device="meta")}, {}), "on meta"),
        (CheckpointState(1, {"__metadata__": torch.zeros(1)}, {}), "cannot name a tensor"),
        (CheckpointState(1, {"": torch.zeros(1)}, {}), "cannot name a tensor"),
        (CheckpointState(1, {"a\x1b[2J": torch.zeros(1)}, {}), "cannot name a tensor"),
        (CheckpointState(1, {}, {"a": [{"b": {1, 2}}]}), r"facts\.a\[0\]\.b is a set"),
        (CheckpointState(1, {}, {"a": {1: 2}}), r"facts\.a is a dict"),
        (CheckpointState(1, {}, {"a": 10**5000}), "cannot be written as JSON"),
    ],
)
def test_a_tensor_that_could_not_be_restored_is_refused_by_name(folder, state, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        save_checkpoint(folder, state, generation=0)
    assert not folder.exists() or names(folder) == []


def test_facts_nested_too_deeply_are_refused_when_saving(folder):
    facts = {"a": 1}
    for _ in range(40):
        facts = {"a": facts}
    with pytest.raises(CheckpointError, match="nested deeper than 32"):
        save_checkpoint(folder, CheckpointState(1, {}, facts), generation=0)


def test_keep_zero_is_refused(folder):
    with pytest.raises(CheckpointError, match="keep at least 1"):
        save_checkpoint(folder, state_at(1), generation=0, keep=0)


def test_a_folder_that_cannot_be_created_is_a_checkpoint_error(tmp_path):
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(CheckpointError, match="could not be written"):
        save_checkpoint(tmp_path / "run" / "checkpoints", state_at(1), generation=0)
