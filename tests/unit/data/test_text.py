import numpy as np
import pytest
import torch

from stretto.data.text import Text, TextConfig
from stretto.errors import ConfigError


@pytest.fixture
def counting_file(tmp_path):
    """A file of 256 bytes; each byte is its own position."""
    path = tmp_path / "counting.bin"
    path.write_bytes(bytes(range(256)))
    return str(path)


def test_a_sample_is_its_window_and_the_bytes_that_follow(counting_file):
    source = Text(TextConfig(path=counting_file, context=4), train=True)
    inputs, targets = source.batch(np.array([2, 0]))
    assert inputs.tolist() == [[10, 11, 12, 13], [0, 1, 2, 3]]
    assert targets.tolist() == [[11, 12, 13, 14], [1, 2, 3, 4]]


def test_the_last_part_of_the_file_is_held_out(counting_file):
    config = TextConfig(path=counting_file, context=4, held_out=0.2)  # 51 windows of 5 bytes
    train, test = Text(config, train=True), Text(config, train=False)
    assert (train.num_samples, test.num_samples) == (41, 10)
    assert test.batch(np.array([0]))[0][0, 0] == 41 * 5


@pytest.mark.parametrize("held_out", [0.001, 0.999])
def test_each_split_has_at_least_one_sample(counting_file, held_out):
    config = TextConfig(path=counting_file, context=64, held_out=held_out)
    assert min(Text(config, train=t).num_samples for t in (True, False)) == 1


def test_no_indices_give_tensors_of_length_zero(counting_file):
    inputs, targets = Text(TextConfig(path=counting_file), train=True).batch(np.arange(0))
    assert inputs.shape == targets.shape == (0, 64)
    assert inputs.dtype == targets.dtype == torch.int64


def test_an_index_in_the_held_out_part_is_refused(counting_file):
    source = Text(TextConfig(path=counting_file, context=4), train=True)
    with pytest.raises(IndexError):
        source.batch(np.array([source.num_samples]))


def test_the_error_for_a_missing_file_has_its_full_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        Text(TextConfig(path="absent.txt"), train=True)
    assert "data.path = 'absent.txt'" in str(refused.value)
    assert str(tmp_path / "absent.txt") in str(refused.value)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path"):
        Text(TextConfig(path=str(tmp_path)), train=True)


@pytest.mark.parametrize("num_bytes", [0, 1, 129])
def test_the_error_for_a_short_file_has_the_required_size(tmp_path, num_bytes):
    path = tmp_path / "short.txt"
    path.write_bytes(b"a" * num_bytes)
    with pytest.raises(ConfigError, match=rf"data\.path.* {num_bytes} bytes.*at least 130"):
        Text(TextConfig(path=str(path)), train=True)


def test_the_shortest_valid_file_has_a_window_for_each_split(tmp_path):
    path = tmp_path / "enough.txt"
    path.write_bytes(b"a" * 130)
    config = TextConfig(path=str(path))
    assert [Text(config, train=t).num_samples for t in (True, False)] == [1, 1]
