import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from stretto.data.images import cache as module
from stretto.data.images.cache import CacheSpec, open_folder_cache, open_memory_cache
from stretto.errors import ConfigError

SIDE = 8
ROW = 8 + 3 * SIDE**2


def cache_spec(num_samples=10, limit=None, fraction=1.0):
    return CacheSpec((SIDE, SIDE, 3), num_samples, fraction, limit)


def images(count):
    return np.random.default_rng(0).integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)


def read(cache, indices):
    out = np.zeros((len(indices), SIDE, SIDE, 3), dtype=np.uint8)
    return cache.read(np.array(indices), out), out


def files(folder):
    return sorted(folder.iterdir())


def names(folder):
    return [path.name for path in files(folder)]


@pytest.fixture
def cache(tmp_path):
    return open_folder_cache(tmp_path, "train", "1", cache_spec())


def test_only_written_rows_are_found(cache):
    shown = images(10)
    for index in (3, 7):
        cache.write(index, shown[index])
    found, pixels = read(cache, [7, 0, 3, 7])
    assert found.tolist() == [True, False, True, True]
    assert np.array_equal(pixels[[0, 2, 3]], shown[[7, 3, 7]])


@pytest.mark.parametrize("offset", [0, 7, 8, ROW - 1], ids=["digest", "end of it", "image", "last"])
def test_a_row_with_one_flipped_bit_is_not_found(tmp_path, cache, offset):
    for index, image in enumerate(images(3)):
        cache.write(index, image)
    (path,) = files(tmp_path)
    with path.open("r+b") as file:
        file.seek(ROW + offset)
        (byte,) = file.read(1)
        file.seek(ROW + offset)
        file.write(bytes([byte ^ 1]))
    assert read(cache, [0, 1, 2])[0].tolist() == [True, False, True]


def test_a_row_copied_to_another_index_is_not_found(tmp_path, cache):
    cache.write(0, images(1)[0])
    (path,) = files(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:ROW] * 2 + content[2 * ROW :])
    assert read(open_folder_cache(tmp_path, "train", "1", cache_spec()), [0, 1])[0].tolist() == [
        1,
        0,
    ]


def test_two_caches_on_one_file_share_their_rows(tmp_path, cache):
    other = open_folder_cache(tmp_path, "train", "1", cache_spec())
    other.write(4, images(1)[0])
    assert read(cache, [4])[0].all()


@pytest.mark.parametrize("limit", [0.5, ROW - 1, ROW, 3.5 * ROW, 10 * ROW, 10**9])
@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_the_file_stays_below_its_limit(tmp_path, limit, fraction):
    cache = open_folder_cache(
        tmp_path, "train", "1", cache_spec(limit=int(limit), fraction=fraction)
    )
    for index, image in enumerate(images(10)):
        cache.write(index, image)
    (path,) = files(tmp_path)
    assert path.stat().st_size <= limit * fraction
    assert cache.capacity == min(10, int(limit * fraction) // ROW)
    assert read(cache, range(10))[0].sum() == cache.capacity


def test_space_is_reserved_before_anything_is_written(tmp_path, cache):
    (path,) = files(tmp_path)
    assert path.stat().st_blocks * 512 >= cache.capacity * ROW


def test_a_reopened_file_still_has_its_rows(tmp_path):
    open_folder_cache(tmp_path, "train", "1", cache_spec()).write(2, images(1)[0])
    assert read(open_folder_cache(tmp_path, "train", "1", cache_spec()), [2])[0].all()


@pytest.mark.parametrize("change", [{"version": "2"}, {"limit": 5 * ROW}])
def test_a_file_of_another_version_or_limit_is_replaced(tmp_path, change):
    open_folder_cache(tmp_path, "train", "1", cache_spec()).write(2, images(1)[0])
    other = open_folder_cache(
        tmp_path, "train", change.get("version", "1"), cache_spec(limit=change.get("limit"))
    )
    assert not read(other, range(other.capacity))[0].any()
    assert len(files(tmp_path)) == 1


def test_a_file_of_another_version_is_kept_while_it_is_mapped(tmp_path):
    one = open_folder_cache(tmp_path, "train", "1", cache_spec())
    two = open_folder_cache(tmp_path, "train", "2", cache_spec())
    assert names(tmp_path) == ["train-1-free", "train-2-free"]
    del one
    three = open_folder_cache(tmp_path, "train", "3", cache_spec())
    assert names(tmp_path) == ["train-2-free", "train-3-free"]
    del two, three


def test_a_shared_file_is_kept_until_its_last_user_is_gone(tmp_path):
    shared = [open_folder_cache(tmp_path, "train", "1", cache_spec()) for _ in range(2)]
    shared.pop()
    open_folder_cache(tmp_path, "train", "2", cache_spec())
    assert "train-1-free" in names(tmp_path)
    shared.pop()
    open_folder_cache(tmp_path, "train", "2", cache_spec())
    assert "train-1-free" not in names(tmp_path)


HOLDER = """
import sys
from pathlib import Path
from stretto.data.images.cache import CacheSpec, open_folder_cache
cache = open_folder_cache(Path(sys.argv[1]), "train", "1", CacheSpec((8, 8, 3), 10, 1.0, None))
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.multi
def test_a_file_of_another_process_is_kept_until_that_is_killed(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"open\n"
        open_folder_cache(tmp_path, "train", "2", cache_spec())
        there = names(tmp_path)
        holder.kill()
    open_folder_cache(tmp_path, "train", "2", cache_spec())
    assert (there, names(tmp_path)) == (["train-1-free", "train-2-free"], ["train-2-free"])


@contextmanager
def opened_folder(folder):
    """Yield a descriptor of a folder, to lock it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_the_folder_is_locked_while_a_file_is_open_and_has_no_lock_yet(tmp_path, monkeypatch):
    lock, refused = fcntl.flock, []

    def record(file, operation):
        if operation == fcntl.LOCK_SH:
            with opened_folder(tmp_path) as opened:
                with pytest.raises(BlockingIOError):
                    lock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                refused.append(file)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", record)
    cache = open_folder_cache(tmp_path, "train", "1", cache_spec())
    assert (len(refused), cache.capacity) == (1, 10)
    with opened_folder(tmp_path) as opened:  # and is not any longer
        lock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_threads_that_open_and_close_a_file_all_share_it(tmp_path):
    image = images(1)[0]

    def come_and_go(seed):
        for version in np.random.default_rng(seed).integers(0, 3, 50):
            mine = open_folder_cache(tmp_path, "train", str(version), cache_spec())
            mine.write(seed, image)
            next_one = open_folder_cache(tmp_path, "train", str(version), cache_spec())
            assert read(next_one, [seed])[0].all()

    with ThreadPoolExecutor(4) as crowd:
        list(crowd.map(come_and_go, range(4)))


def test_a_file_of_another_user_is_not_deleted(tmp_path, monkeypatch):
    open_folder_cache(tmp_path, "train", "1", cache_spec())
    real_open = os.open

    def guarded(path, *arguments, **options):
        if str(path).endswith("train-1-free"):  # root, who may run this, is refused nothing
            raise PermissionError(13, "Permission denied")
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", guarded)
    assert open_folder_cache(tmp_path, "train", "2", cache_spec()).capacity == 10
    assert names(tmp_path) == ["train-1-free", "train-2-free"]


def test_the_file_of_another_split_is_not_deleted(tmp_path, cache):
    open_folder_cache(tmp_path, "test", "1", cache_spec())
    assert len(files(tmp_path)) == 2


def test_a_truncated_file_is_extended(tmp_path, cache):
    (path,) = files(tmp_path)
    os.truncate(path, 3 * ROW + 5)
    assert open_folder_cache(tmp_path, "train", "1", cache_spec()).capacity == 10


def leave_free(monkeypatch, num_bytes):
    """Make every file system say that it has ``num_bytes`` free."""
    monkeypatch.setattr(
        os, "fstatvfs", lambda _file: SimpleNamespace(f_bavail=num_bytes, f_frsize=1)
    )


def test_a_cache_larger_than_the_free_space_is_refused_with_both_sizes(tmp_path, monkeypatch):
    leave_free(monkeypatch, 7 * ROW)
    with pytest.raises(ConfigError, match=r"data\.cache_size = 1\.8 KB: .* room for 1\.4 KB"):
        open_folder_cache(tmp_path, "train", "1", cache_spec(limit=9 * ROW))
    assert sum(path.stat().st_size for path in files(tmp_path)) == 0


def test_without_a_limit_half_of_the_free_space_is_used(tmp_path, monkeypatch):
    leave_free(monkeypatch, 7 * ROW)
    assert open_folder_cache(tmp_path, "train", "1", cache_spec()).capacity == 3


def test_without_a_limit_at_most_the_default_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DEFAULT_BYTES", 4 * ROW)
    assert open_folder_cache(tmp_path, "train", "1", cache_spec()).capacity == 4


def test_the_error_for_an_unwritable_folder_names_the_setting(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"cannot keep images in .*file/cache.*data\.cache_folder"
    ):
        open_folder_cache(tmp_path / "file" / "cache", "train", "1", cache_spec())


def test_a_memory_cache_respects_the_memory_limit_of_the_job(monkeypatch):
    monkeypatch.setattr(module, "cgroup_memory_left", lambda: 7 * ROW)
    assert open_memory_cache("test-of-a-job", cache_spec(), int).capacity == 3
    with pytest.raises(ConfigError, match=r"shm, in the memory of this job, has room for 1\.4 KB"):
        open_memory_cache("test-of-a-job", cache_spec(limit=9 * ROW), int)


def test_a_file_cache_ignores_the_memory_limit_of_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "cgroup_memory_left", lambda: 0)
    assert open_folder_cache(tmp_path, "train", "1", cache_spec()).capacity == 10


def test_the_error_for_missing_memory_names_the_settings(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"No space left on device; lower data\.cache_size"):
        open_memory_cache("test-of-a-full-memory", cache_spec(), int)
    assert not Path("/dev/shm/stretto-test-of-a-full-memory").exists()


def test_memory_is_allocated_only_after_the_file_is_unlinked(monkeypatch):
    path, calls = Path("/dev/shm/stretto-test-of-names"), []
    reserve = os.posix_fallocate

    def record(*arguments):
        calls.append(path.exists())
        reserve(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", record)
    open_memory_cache("test-of-names", cache_spec(), lambda: calls.append(path.stat().st_size))
    assert calls == [0, False]


def test_the_file_is_unlinked_if_another_rank_never_arrives():
    def broken():
        raise ConnectionError("lost a peer")

    with pytest.raises(ConnectionError, match="lost a peer"):
        open_memory_cache("test-of-a-lost-peer", cache_spec(), broken)
    assert not Path("/dev/shm/stretto-test-of-a-lost-peer").exists()


def test_a_host_without_shared_memory_uses_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path / "absent")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    calls = []
    cache = open_memory_cache("x", cache_spec(), lambda: calls.extend(files(tmp_path)))
    cache.write(1, images(1)[0])
    assert (len(calls), files(tmp_path), read(cache, [1])[0].all()) == (1, [], True)
