import os
import shutil
import subprocess

import pytest
import torch

from stretto.checkpoint import State, load_newest, load_one, save, shards, writing
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


def test_what_was_saved_tells_its_place_and_size(folder):
    saved = save(folder, state_at(10), generation=0)
    assert saved.path == folder / "step-00000010"
    assert saved.num_bytes == sum(file.stat().st_size for file in saved.path.iterdir())
    assert saved.seconds > 0


def test_the_seal_can_be_checked_with_sha256sum(folder):
    saved = save(folder, state_at(1), generation=0)
    subprocess.run(
        ["sha256sum", "--check", "--strict", "manifest.sha256"],
        cwd=saved.path,
        check=True,
        capture_output=True,
    )


def test_only_the_newest_ones_are_kept(folder):
    for step in range(1, 6):
        save(folder, state_at(step), generation=0, keep=3)
    assert names(folder) == ["step-00000003", "step-00000004", "step-00000005"]


def test_keep_one_leaves_one(folder):
    for step in (1, 2):
        save(folder, state_at(step), generation=0, keep=1)
    assert names(folder) == ["step-00000002"]


def test_the_last_valid_older_checkpoint_outlives_damaged_younger_ones(folder):
    for step in (1, 2):
        save(folder, state_at(step), generation=0)
    spoil(folder / "step-00000002")
    save(folder, state_at(3), generation=0)
    assert names(folder) == ["step-00000001", "step-00000002", "step-00000003"]
    spoil(folder / "step-00000003")
    assert load_newest(folder, log=lambda _: None).step == 1


def test_a_spared_checkpoint_goes_once_a_younger_valid_one_is_there(folder):
    for step in (1, 2):
        save(folder, state_at(step), generation=0)
    spoil(folder / "step-00000002")
    for step in (3, 4):
        save(folder, state_at(step), generation=0)
    assert names(folder) == ["step-00000003", "step-00000004"]


def test_later_steps_survive_a_save_of_an_earlier_one(folder):
    save(folder, state_at(9), generation=0)
    save(folder, state_at(2), generation=0, keep=1)
    assert names(folder) == ["step-00000002", "step-00000009"]


def test_a_step_done_again_replaces_the_first(folder):
    first = state_at(5)
    save(folder, first, generation=0)
    again = State(5, {"model/w": torch.tensor([-1.0])}, {"seed": 8})
    save(folder, again, generation=1)
    assert names(folder) == ["step-00000005"]
    assert_same(load_one(folder / "step-00000005"), again)


def test_a_reader_that_puts_the_old_one_back_does_not_stop_a_replacement(folder, monkeypatch):
    save(folder, state_at(5), generation=0)
    rename, meddled = type(folder).rename, []

    def rename_then_meddle(source, target):
        result = rename(source, target)
        if ".replaced-" in str(target) and not meddled:
            meddled.append(target)
            rename(target, source)
        return result

    monkeypatch.setattr(type(folder), "rename", rename_then_meddle)
    again = State(5, {"model/w": torch.tensor([-1.0])}, {})
    save(folder, again, generation=0)
    assert meddled
    assert names(folder) == ["step-00000005"]
    assert_same(load_one(folder / "step-00000005"), again)


def test_leftovers_of_a_crash_are_cleared_by_the_next_save(folder):
    (folder / "step-00000001.tmp-1-1").mkdir(parents=True)
    save(folder, state_at(2), generation=2)
    assert names(folder) == ["step-00000002"]


def test_a_state_is_cut_into_files_of_bounded_size(folder, monkeypatch):
    monkeypatch.setattr(shards, "MAX_FILE_BYTES", 100)
    tensors = {f"model/{i}": torch.full((10,), float(i)) for i in range(5)}
    tensors["model/large"] = torch.zeros(100)
    saved = save(folder, State(1, tensors, {}), generation=0)
    files = [file for file in names(saved.path) if file.startswith("tensors-")]
    assert files == [f"tensors-{i:05d}.safetensors" for i in range(4)]
    assert_same(load_one(saved.path), State(1, tensors, {}))


def test_a_state_without_tensors_is_a_state(folder):
    saved = save(folder, State(0, {}, {"note": "nothing yet"}), generation=0)
    assert_same(load_one(saved.path), State(0, {}, {"note": "nothing yet"}))


def test_too_little_space_is_told_with_both_numbers_before_anything_is_written(folder, monkeypatch):
    save(folder, state_at(1), generation=0)
    usage = shutil.disk_usage(folder)._replace(free=1234)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage)
    big = State(2, {"model/w": torch.zeros(10**6)}, {})
    with pytest.raises(CheckpointError, match=r"needs 4\d{6} bytes.*has 1234 free"):
        save(folder, big, generation=0)
    assert names(folder) == ["step-00000001"]


def test_the_space_asked_for_is_enough(folder, monkeypatch):
    tensors = {f"model/layer.{i}.weight": torch.zeros(3) for i in range(2000)}
    usage = shutil._ntuple_diskusage(0, 0, 0)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="needs") as refused:
        save(folder, State(1, tensors, {"words": ["x"] * 1000}), generation=0)
    needed_bytes = int(str(refused.value).split("needs ")[1].split()[0])
    monkeypatch.undo()
    saved = save(folder, State(1, tensors, {"words": ["x"] * 1000}), generation=0)
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


def test_a_disk_that_fills_up_while_saving_costs_only_the_new_checkpoint(tiny_disk, monkeypatch):
    folder = tiny_disk / "checkpoints"
    save(folder, state_at(1), generation=0)
    plenty = shutil.disk_usage("/")._replace(free=10**12)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: plenty)
    big = State(2, {"model/w": torch.zeros(10**6)}, {})
    with pytest.raises(CheckpointError, match="No space left"):
        save(folder, big, generation=0)
    assert names(folder) == ["step-00000001"]
    assert_same(load_newest(folder, log=pytest.fail), state_at(1))


def test_a_full_disk_is_noticed_before_writing(tiny_disk):
    with pytest.raises(CheckpointError, match="nothing was written"):
        save(tiny_disk / "checkpoints", State(1, {"w": torch.zeros(10**6)}, {}), generation=0)


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        (State(-1, {}, {}), "step must be between"),
        (State(10**18, {}, {}), "step must be between"),
        (State(1, {"w": torch.zeros(1, dtype=torch.complex128)}, {}), "'w' is torch.complex128"),
        (State(1, {"w": torch.eye(2).to_sparse()}, {}), "torch.sparse_coo"),
        (State(1, {"w": torch.zeros(1, device="meta")}, {}), "on meta"),
        (State(1, {"__metadata__": torch.zeros(1)}, {}), "cannot name a tensor"),
        (State(1, {"": torch.zeros(1)}, {}), "cannot name a tensor"),
        (State(1, {"a\x1b[2J": torch.zeros(1)}, {}), "cannot name a tensor"),
        (State(1, {}, {"a": [{"b": {1, 2}}]}), r"facts\.a\[0\]\.b is a set"),
        (State(1, {}, {"a": {1: 2}}), r"facts\.a is a dict"),
        (State(1, {}, {"a": 10**5000}), "cannot be written as JSON"),
    ],
)
def test_a_state_that_could_not_be_read_back_is_refused_by_name(folder, state, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        save(folder, state, generation=0)
    assert not folder.exists() or names(folder) == []


def test_facts_nested_too_deep_are_refused_when_saving(folder):
    facts = {"a": 1}
    for _ in range(40):
        facts = {"a": facts}
    with pytest.raises(CheckpointError, match="nested deeper than 32"):
        save(folder, State(1, {}, facts), generation=0)


def test_keep_zero_is_refused(folder):
    with pytest.raises(CheckpointError, match="keep at least 1"):
        save(folder, state_at(1), generation=0, keep=0)


def test_a_folder_that_cannot_be_made_is_a_checkpoint_error(tmp_path):
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path / "run" / "checkpoints", state_at(1), generation=0)
