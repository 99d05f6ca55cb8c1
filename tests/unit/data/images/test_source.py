"""Image folders as a sample source; ranks are threads, decoders are processes."""

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stretto.data import HostContext, ImageFolder, ImagesConfig, ReadStatistics, SkippedSample
from stretto.data.images import decoder_pool as pool_module
from stretto.errors import ConfigError
from tests.unit.data.images.deaths import ask_when_ready, decoder_pids, kill_when_asked
from tests.unit.data.images.pictures import (
    CORRUPT,
    PLAIN,
    RUN_KEY,
    data_folder,
    encoded,
    fill,
    noise,
    numbers,
    single_rank,
)

pytestmark = pytest.mark.multi
ALL = np.arange(12)


@pytest.fixture
def folder(tmp_path):
    return data_folder(tmp_path / "data")


def config(folder, **settings):
    small = {"size": 16, "augment": "none", "decoders": 1}
    return ImagesConfig(path=str(folder), **PLAIN | small | settings)


@pytest.fixture
def images(folder):
    """Open and start a training source; it is closed at the end of the test."""
    with ExitStack() as stack:

        def open_one(*, train=True, **settings):
            source = stack.enter_context(
                closing(ImageFolder(config(folder, **settings), train=train))
            )
            source.start(single_rank())
            return source

        yield open_one


def start_ranks(sources, keys=(RUN_KEY, RUN_KEY)):
    """Start one source per rank, all ranks of one host, as threads with a barrier."""
    barrier = threading.Barrier(len(sources))
    places = [
        HostContext(rank, len(sources), key, lambda: barrier.wait(20))
        for rank, key in enumerate(keys)
    ]
    with ThreadPoolExecutor(len(sources)) as ranks:
        list(ranks.map(lambda source, host: source.start(host), sources, places))


def test_rows_are_in_the_order_of_the_indices(images):
    inputs, targets = images().batch(np.array([7, 0, 11, 7]))
    assert numbers(inputs) == [7, 0, 11, 7]
    assert targets.tolist() == [1, 0, 1, 1]
    assert (inputs.dtype, inputs.shape) == (torch.float32, (4, 3, 16, 16))
    assert targets.dtype == torch.int64


def test_evaluation_has_its_own_images(images):
    source = images(train=False)
    assert (source.num_samples, source.classes) == (4, ("a", "b"))
    assert numbers(source.batch(np.arange(4))[0]) == [0, 1, 2, 3]


def test_no_indices_give_tensors_of_length_zero(images):
    inputs, targets = images().batch(np.arange(0))
    assert (inputs.shape, targets.shape) == ((0, 3, 16, 16), (0,))


def test_a_batch_before_the_start_has_the_same_bits_as_one_after_it(folder):
    with closing(ImageFolder(config(folder, augment="crop"), train=True)) as source:
        before = source.batch(ALL, 3)[0]
        source.start(single_rank())
        assert torch.equal(source.batch(ALL, 3)[0], before)


def test_a_sample_from_the_cache_has_the_bits_of_a_decoded_one(images):
    source = images(augment="pad_crop")
    first, again = source.batch(ALL, 1)[0], source.batch(ALL, 1)[0]
    assert source.take_statistics() == ReadStatistics(decoded=12, cached=12)
    assert torch.equal(first, again)


def test_area_crops_have_the_same_bits_cached_or_not_with_any_number_of_threads(tmp_path):
    sizes = [(24, 20), (40, 30), (9, 31), (64, 64)]
    files = {f"train/a/{i}.png": encoded(noise(*s, i), "PNG") for i, s in enumerate(sizes)}
    root = fill(tmp_path, files | {"test/a/0.png": files["train/a/1.png"]})
    shown = []
    for decoders in (1, 3):
        settings = config(root, augment="area_crop", decoders=decoders, cache="file")
        with closing(ImageFolder(settings, train=True)) as source:
            shown.append(source.batch(np.arange(4), 2)[0])
            source.start(single_rank())
            shown += [source.batch(np.arange(4), 2)[0] for _ in range(2)]
        assert source.take_statistics() == ReadStatistics(
            decoded=4 + 4 * (decoders == 1), cached=4 + 4 * (decoders > 1)
        )
    assert all(torch.equal(one, shown[0]) for one in shown)
    assert not any("crops" in thread.name for thread in threading.enumerate())


def test_evaluation_after_area_crops_scales_the_shorter_side_to_8_by_7_of_size(tmp_path):
    image = noise(60, 40)
    content = encoded(image, "PNG")
    root = fill(tmp_path, {"train/a/0.png": content, "test/a/0.png": content})
    with closing(ImageFolder(config(root, size=28, augment="area_crop"), train=False)) as source:
        (shown,), _ = source.batch(np.arange(1))
    scaled = image.resize((32, 32), Image.Resampling.BILINEAR, box=(10, 0, 50, 40))
    expected = torch.from_numpy(np.array(scaled)[2:30, 2:30]).permute(2, 0, 1) / 255
    torch.testing.assert_close(shown, expected)


def test_epochs_show_different_crops_and_the_same_classes(tmp_path):
    files = {f"train/{'ab'[i % 2]}/{i}.png": encoded(noise(40, 30, i), "PNG") for i in range(12)}
    root = fill(tmp_path, files | {f"test/{c}/0.png": files["train/a/0.png"] for c in "ab"})
    with closing(ImageFolder(config(root, augment="crop", store=24), train=True)) as source:
        (one, first), (other, second) = source.batch(ALL, 0), source.batch(ALL, 1)
        again, _ = source.batch(ALL, 0)
    assert torch.equal(first, second)
    assert first.tolist() == [0] * 6 + [1] * 6
    assert ((one - other).abs().mean(dim=(1, 2, 3)) > 0.05).sum() >= 10
    assert torch.equal(one, again)


@pytest.mark.parametrize("cache", ["memory", "file"])
def test_the_second_epoch_decodes_nothing(images, cache):
    source = images(cache=cache)
    source.batch(ALL, 0)
    assert source.take_statistics() == ReadStatistics(decoded=12)
    source.batch(ALL[::-1].copy(), 1)
    assert source.take_statistics() == ReadStatistics(cached=12)


def test_without_a_cache_every_epoch_decodes(images):
    source = images(cache="none")
    for epoch in range(2):
        source.batch(ALL, epoch)
        assert source.take_statistics() == ReadStatistics(decoded=12)


@pytest.mark.parametrize("cache", ["memory", "file"])
def test_an_image_decoded_by_one_rank_is_cached_for_the_others(folder, cache):
    sources = [ImageFolder(config(folder, cache=cache), train=True) for _ in range(2)]
    with closing(sources[0]), closing(sources[1]):
        start_ranks(sources)
        sources[0].batch(ALL[::2])
        assert numbers(sources[1].batch(ALL)[0]) == ALL.tolist()
        assert sources[1].take_statistics() == ReadStatistics(decoded=6, cached=6)


def test_memory_is_not_shared_with_another_run(folder):
    one, other = (ImageFolder(config(folder), train=True) for _ in range(2))
    with closing(one), closing(other):
        start_ranks([one, other], keys=["one", "other"])  # at the same time, on one host
        one.batch(ALL)
        other.batch(ALL)
        assert other.take_statistics() == ReadStatistics(decoded=12)


def test_a_cache_file_is_used_by_a_later_run(folder, images):
    with closing(ImageFolder(config(folder, cache="file"), train=True)) as earlier:
        earlier.start(single_rank("earlier"))
        earlier.batch(ALL)
    later = images(cache="file")
    later.batch(ALL)
    assert later.take_statistics() == ReadStatistics(cached=12)


@pytest.mark.parametrize("change", ["file", "store"])
def test_a_cache_file_is_not_used_for_other_images_or_settings(folder, images, change):
    with closing(ImageFolder(config(folder, cache="file"), train=True)) as earlier:
        earlier.start(single_rank("earlier"))
        earlier.batch(ALL)
    if change == "file":
        os.utime(folder / "train" / "a" / "000.jpg", ns=(1, 1))
    later = images(cache="file", store=18 if change == "store" else 16)
    later.batch(ALL)
    assert later.take_statistics() == ReadStatistics(decoded=12)
    assert len(list((folder / ".stretto-cache").iterdir())) == 1


def test_two_runs_with_different_settings_keep_their_cache_files(folder, images):
    one, other = images(cache="file"), images(cache="file", store=18)
    one.batch(ALL)
    other.batch(ALL)
    again = images(cache="file")
    again.batch(ALL)
    assert again.take_statistics() == ReadStatistics(cached=12)


def test_training_and_evaluation_share_the_cache_limit(folder, images, tmp_path):
    limit = 6000
    for train in (True, False):
        source = images(
            train=train, cache="file", cache_size=limit, cache_folder=str(tmp_path / "c")
        )
        source.batch(np.arange(source.num_samples))
    sizes = [path.stat().st_size for path in (tmp_path / "c").iterdir()]
    assert len(sizes) == 2
    assert 0 < sum(sizes) <= limit


def test_samples_beyond_the_cache_limit_are_decoded_each_time(images):
    source = images(cache_size=4 * (8 + 3 * 16**2) * 16 // 12 + 2)  # 4 rows for training
    for cached in (0, 4):
        assert numbers(source.batch(ALL)[0]) == ALL.tolist()
        assert source.take_statistics() == ReadStatistics(decoded=12 - cached, cached=cached)


def test_a_damaged_row_is_decoded_again(folder, images):
    source = images(cache="file")
    before = source.batch(ALL)[0]
    (path,) = (folder / ".stretto-cache").iterdir()
    content = bytearray(path.read_bytes())
    content[5 * (8 + 3 * 16**2) + 100] ^= 0x10
    path.write_bytes(content)
    source.take_statistics()
    assert torch.equal(source.batch(ALL)[0], before)
    assert source.take_statistics() == ReadStatistics(decoded=1, cached=11)


def test_no_file_name_remains_in_shared_memory_during_a_run(images):
    source = images()
    source.batch(ALL)
    maps = Path("/proc/self/maps").read_text().splitlines()
    caches = [line for line in maps if "/dev/shm/stretto-" in line]
    assert caches
    assert all(line.endswith("(deleted)") for line in caches)


def test_a_bad_file_is_left_out_and_reported_in_each_epoch(folder, images):
    bad = {"train/a/003.jpg": CORRUPT["text"], "train/b/010.jpg": CORRUPT["empty"]}
    fill(folder, bad)
    source = images()
    for epoch in range(2):
        inputs, targets = source.batch(ALL, epoch)
        assert numbers(inputs) == [0, 1, 2, 4, 5, 6, 7, 8, 9, 11]
        assert targets.tolist() == [0] * 5 + [1] * 5
        statistics = source.take_statistics()
        assert [s.sample for s in statistics.skipped] == list(bad)
        assert statistics.skipped[1] == SkippedSample("train/b/010.jpg", "empty file")


def test_a_bad_file_is_not_decoded_again(folder, images):
    path = folder / "train" / "a" / "003.jpg"
    good = path.read_bytes()
    path.write_bytes(b"")
    source = images()
    source.batch(ALL)
    path.write_bytes(good)
    assert 3 not in numbers(source.batch(ALL)[0])


def test_a_missing_file_is_read_once_it_is_there_again(folder, images):
    path = folder / "train" / "a" / "003.jpg"
    source = images()
    path.rename(folder / "elsewhere")
    assert 3 not in numbers(source.batch(ALL)[0])
    reason = "cannot be read: No such file or directory"
    assert source.take_statistics().skipped == (SkippedSample("train/a/003.jpg", reason),)
    (folder / "elsewhere").rename(path)
    assert numbers(source.batch(ALL)[0]) == ALL.tolist()
    assert source.take_statistics() == ReadStatistics(decoded=1, cached=11)


def test_a_file_that_hung_is_tried_again(folder, images, monkeypatch):
    monkeypatch.setattr(pool_module, "REPLY_TIMEOUT_S", 2.0)
    path = folder / "train" / "a" / "003.jpg"
    good = path.read_bytes()
    source = images()
    path.unlink()
    os.mkfifo(path)  # nobody will ever write to it
    assert 3 not in numbers(source.batch(ALL)[0])
    (skipped,) = source.take_statistics().skipped
    assert "no answer for 2 s" in skipped.reason
    path.unlink()
    path.write_bytes(good)
    assert numbers(source.batch(ALL)[0]) == ALL.tolist()


def test_a_file_whose_decoders_were_killed_is_tried_again(images, monkeypatch):
    source = images()
    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "MAX_PENDING_PER_DECODER", 1)
        ask_when_ready(patch)
        kill_when_asked(patch, lambda path: path.endswith(b"a/003.jpg"))
        assert 3 not in numbers(source.batch(ALL)[0])
    (skipped,) = source.take_statistics().skipped
    assert skipped == SkippedSample("train/a/003.jpg", "killed the decoder twice (signal 9)")
    assert numbers(source.batch(ALL)[0]) == ALL.tolist()


def test_a_batch_of_only_bad_files_has_length_zero(folder, images):
    fill(folder, {"train/a/003.jpg": b""})
    inputs, targets = images().batch(np.array([3, 3]))
    assert (inputs.shape, targets.shape) == ((0, 3, 16, 16), (0,))


def test_a_killed_decoder_loses_no_sample(images):
    source = images(cache="none", decoders=2)
    source.batch(ALL)
    for pid in decoder_pids():
        os.kill(pid, signal.SIGKILL)
    assert numbers(source.batch(ALL)[0]) == ALL.tolist()
    assert source.take_statistics() == ReadStatistics(decoded=24)


def test_closing_ends_the_decoders_and_may_be_repeated(images):
    source = images()
    source.batch(ALL)
    (pid,) = decoder_pids()
    source.close()
    source.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("cores", "local_size", "expected"), [(64, 4, 8), (8, 4, 2), (2, 4, 1), (6, 1, 6)]
)
def test_the_number_of_decoders_is_the_ranks_share_of_the_cores(
    folder, monkeypatch, cores, local_size, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    limits = []

    class Counted(pool_module.DecoderPool):
        def __init__(self, limit, **more):
            limits.append(limit)
            super().__init__(limit, **more)

    monkeypatch.setattr("stretto.data.images.image_folder.DecoderPool", Counted)
    with closing(ImageFolder(config(folder, decoders=None, cache="none"), train=True)) as source:
        source.start(HostContext(0, local_size, RUN_KEY, barrier=lambda: None))
    assert limits == [expected]


def test_the_fingerprint_depends_on_the_list_of_images(folder, tmp_path):
    there = data_folder(tmp_path / "copy")
    here, copy = (ImageFolder(config(root), train=True).fingerprint for root in (folder, there))
    fill(there, {"train/a/new.jpg": b"x"})
    assert here == copy != ImageFolder(config(there), train=True).fingerprint
    assert here != ImageFolder(config(folder), train=False).fingerprint


def test_the_error_for_a_missing_pillow_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r'pip install "stretto\[vision\]"'):
        ImageFolder(config(folder), train=True)


def test_a_cache_folder_that_cannot_be_created_is_refused_at_the_start(folder):
    (folder / ".stretto-cache").write_bytes(b"in the way")
    with (
        closing(ImageFolder(config(folder, cache="file"), train=True)) as source,
        pytest.raises(ConfigError, match=r"data\.cache_folder"),
    ):
        source.start(single_rank())
