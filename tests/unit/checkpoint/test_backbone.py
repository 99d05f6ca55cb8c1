"""Backbone files: read back exactly, written atomically, and damage is reported."""

import os

import pytest
import torch
from safetensors.torch import save_file

from stretto.checkpoint import Backbone, load_backbone, save_backbone
from stretto.errors import CheckpointError
from tests.unit.checkpoint.saver import bits

TENSORS = {
    "body.weight": torch.arange(6.0).view(2, 3).t(),
    "body.count": torch.tensor(3),
    "body.half": torch.ones(5, dtype=torch.bfloat16),
    "body.empty": torch.empty(0, 4),
}
BACKBONE = Backbone(TENSORS, {"kind": "cnn", "options": {"n": [1, None]}}, ("head", "head2"), 7)


def test_a_backbone_is_read_back_exactly(tmp_path):
    path = tmp_path / "body.safetensors"
    assert save_backbone(path, BACKBONE) == path.stat().st_size
    found = load_backbone(path)
    assert {name: bits(t) for name, t in found.tensors.items()} == {
        name: bits(t) for name, t in TENSORS.items()
    }
    assert (found.model, found.head, found.step) == (BACKBONE.model, BACKBONE.head, 7)
    assert list(tmp_path.iterdir()) == [path]


def test_equal_backbones_make_equal_files(tmp_path):
    for name in ("a", "b"):
        save_backbone(tmp_path / name, BACKBONE)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_file_of_another_program_is_read_as_tensors_by_name(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"w": torch.ones(2)}, path, {"format": "pt"})
    found = load_backbone(path)
    assert torch.equal(found.tensors["w"], torch.ones(2))
    assert (found.model, found.head, found.step) == ({}, (), 0)


def test_a_link_to_a_file_is_followed(tmp_path):
    save_backbone(tmp_path / "body.safetensors", BACKBONE)
    (tmp_path / "link.safetensors").symlink_to("body.safetensors")
    assert load_backbone(tmp_path / "link.safetensors").step == 7


@pytest.mark.parametrize("kept", [0, 4, 8, 40, -1])
def test_the_error_for_a_truncated_file_names_it(kept, tmp_path):
    path = tmp_path / "body.safetensors"
    save_backbone(path, BACKBONE)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"body\.safetensors is not a safetensors file"):
        load_backbone(path)


def test_a_flipped_bit_is_detected(tmp_path):
    path = tmp_path / "body.safetensors"
    save_backbone(path, BACKBONE)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"body\.safetensors does not have the digest"):
        load_backbone(path)


def test_changed_metadata_is_detected(tmp_path):
    path = tmp_path / "body.safetensors"
    save_backbone(path, BACKBONE)
    path.write_bytes(path.read_bytes().replace(rb"\"head\":[", rb"\"haed\":["))
    with pytest.raises(CheckpointError, match="does not say what a backbone file must"):
        load_backbone(path)


def test_the_error_for_a_missing_file_names_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.safetensors is not a file"):
        load_backbone(tmp_path / "none.safetensors")


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = tmp_path / "body.safetensors"
    path.write_bytes(b"before")

    def full(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="could not be written: No space left"):
        save_backbone(path, BACKBONE)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_reported(tmp_path):
    with pytest.raises(CheckpointError, match="could not be written: No such file"):
        save_backbone(tmp_path / "none" / "body.safetensors", BACKBONE)
