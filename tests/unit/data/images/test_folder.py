import os

import pytest

from stretto.data.images.image_folder import digest_split, find_splits
from stretto.errors import ConfigError
from tests.unit.data.images.pictures import data_folder, fill, jpeg


def names(split):
    return [split.name(i) for i in range(len(split))]


def test_files_are_ordered_by_class_and_then_by_name(tmp_path):
    files = ["train/b/2.jpg", "train/b/10.png", "train/a/z.JPEG", "test/a/1.jpg", "test/b/1.jpg"]
    train, test = find_splits(str(fill(tmp_path, dict.fromkeys(files, b"x"))))
    assert names(train) == [b"a/z.JPEG", b"b/10.png", b"b/2.jpg"]
    assert (train.classes, train.labels.tolist()) == (("a", "b"), [0, 1, 1])
    assert test.path(1) == os.fsencode(tmp_path / "test" / "b" / "1.jpg")
    assert test.display_name(1) == "test/b/1.jpg"


def test_hidden_files_other_extensions_and_folders_are_not_samples(tmp_path):
    root = data_folder(tmp_path, 2, 2)
    fill(root, {"train/a/.x.jpg": b"x", "train/a/note.txt": b"x", "train/.hidden/1.jpg": b"x"})
    (root / "train" / "a" / "folder.jpg").mkdir()
    os.mkfifo(root / "train" / "a" / "pipe.jpg")
    train, _ = find_splits(str(root))
    assert names(train) == [b"a/000.jpg", b"b/001.jpg"]


def test_a_dangling_link_is_a_sample(tmp_path):
    root = data_folder(tmp_path, 2, 2)
    (root / "train" / "a" / "gone.jpg").symlink_to(root / "nowhere.jpg")
    assert b"a/gone.jpg" in names(find_splits(str(root))[0])


def test_a_name_may_be_any_bytes(tmp_path):
    root = data_folder(tmp_path, 2, 2)
    odd = os.fsencode(root / "train" / "a") + b"/\xff.jpg"
    os.close(os.open(odd, os.O_CREAT))
    train, _ = find_splits(str(root))
    assert train.path(1) == odd
    assert train.display_name(1) == "train/a/\\xff.jpg"


def test_val_is_used_if_test_has_no_classes(tmp_path):
    files = ["train/a/1.jpg", "val/a/1.jpg", "test/unlabelled.jpg"]
    _, test = find_splits(str(fill(tmp_path, dict.fromkeys(files, b"x"))))
    assert test.folder.name == "val"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["other/1.jpg"], r"train has no folders of classes"),
        (["train/1.jpg", "test/a/1.jpg"], r"train has no folders of classes"),
        (["train/a/1.txt", "test/a/1.jpg"], r"no image in the 1 class folders .*train; .*\.jpg"),
        (["train/a/1.jpg"], r"neither test nor val"),
        (
            ["train/a/1.jpg", "train/b/1.jpg", "test/a/1.jpg", "test/c/1.jpg"],
            r"only in train: b; only in test: c",
        ),
    ],
    ids=["no train", "no class", "no image", "no test", "classes differ"],
)
def test_a_folder_with_another_layout_is_refused_with_the_missing_part(tmp_path, files, message):
    root = fill(tmp_path, dict.fromkeys(files, b"x"))
    with pytest.raises(ConfigError, match=rf"data\.path.*{message}"):
        find_splits(str(root))


def test_the_error_for_a_missing_folder_has_its_full_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        find_splits("absent")
    assert "data.path = 'absent'" in str(refused.value)
    assert str(tmp_path / "absent") in str(refused.value)


def test_a_copy_has_the_same_content_digest(tmp_path):
    one, other = (find_splits(str(data_folder(tmp_path / name)))[0] for name in ("x", "y"))
    assert digest_split(one).content == digest_split(other).content


@pytest.mark.parametrize(
    "change",
    [
        lambda a: (a / "000.jpg").rename(a / "0.jpg"),
        lambda a: (a / "000.jpg").write_bytes(b"x"),
        lambda a: (a / "000.jpg").unlink(),
        lambda a: (a / "000.jpg").rename(a.parent / "b" / "000.jpg"),
        lambda a: (a.parent / "c").mkdir() or (a.parent.parent / "test" / "c").mkdir(),
    ],
    ids=["name", "size", "gone", "class", "classes"],
)
def test_another_list_of_images_has_another_content_digest(tmp_path, change):
    root = data_folder(tmp_path)
    before = digest_split(find_splits(str(root))[0])
    change(root / "train" / "a")
    assert digest_split(find_splits(str(root))[0]).content != before.content


def test_a_file_replaced_by_one_of_equal_size_changes_the_version(tmp_path):
    root = data_folder(tmp_path)
    before = digest_split(find_splits(str(root))[0])
    path = root / "train" / "a" / "000.jpg"
    path.write_bytes(bytes(reversed(jpeg())))
    os.utime(path, ns=(1, 1))
    after = digest_split(find_splits(str(root))[0])
    assert (after.content == before.content, after.version == before.version) == (True, False)
