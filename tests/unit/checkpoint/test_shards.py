import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.checkpoint.manifest import DamagedCheckpointError, TensorEntry
from stretto.checkpoint.tensor_files import (
    describe_tensor,
    pack_tensors,
    split_into_files,
    unpack_tensors,
)
from tests.unit.checkpoint.saver import bits

FILE = "tensors-00000.safetensors"


def round_trip(tensors):
    expected = {name: describe_tensor(tensor, FILE) for name, tensor in tensors.items()}
    return unpack_tensors(pack_tensors(tensors), expected, where="here")


@given(
    sizes=st.lists(st.integers(0, 30), max_size=20),
    max_bytes=st.integers(1, 60),
)
def test_split_keeps_all_tensors_in_order_and_fills_every_file(sizes, max_bytes):
    tensors = {f"t{i}": torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    files = list(split_into_files(tensors, max_bytes))
    assert [name for _, held in files for name in held] == list(tensors)
    assert len({name for name, _ in files}) == len(files)
    num_bytes = [sum(tensor.nbytes for tensor in held.values()) for _, held in files]
    assert all(
        n <= max_bytes or len(held) == 1 for n, (_, held) in zip(num_bytes, files, strict=True)
    )
    following = [next(iter(held.values())).nbytes for _, held in files[1:]]
    assert all(n + more > max_bytes for n, more in zip(num_bytes, following, strict=False))


def test_tied_tensors_and_views_of_one_buffer_are_each_stored_in_full():
    buffer = torch.arange(12.0)
    tensors = {"a": buffer, "tied": buffer, "head": buffer[:4], "tail": buffer[2:].view(2, 5)}
    found = round_trip(tensors)
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in tensors.items()
    }
    found["a"].zero_()
    assert found["tied"].sum() == buffer.sum()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(10.0)[::3],
        torch.ones(()).expand(4, 4),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.view_as_complex(torch.arange(4.0).view(2, 2)).conj(),
        torch.nn.Parameter(torch.ones(3)),
        torch.tensor(3.0),
        torch.empty(0, 5),
        torch.empty(3, 0, dtype=torch.bfloat16),
    ],
    ids=lambda tensor: f"{list(tensor.shape)} {tensor.dtype}",
)
def test_unusual_tensors_are_restored_with_the_same_bits(tensor):
    assert bits(round_trip({"x": tensor})["x"]) == bits(tensor)


def header(content):
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text


EXPECTED = {"x": TensorEntry(file=FILE, dtype="F32", shape=[2])}
HOSTILE = {
    "nothing": b"",
    "huge header": (2**62).to_bytes(8, "little"),
    "no tensors": header({}),
    "not an object": header([1]),
    "offsets outside": header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}),
    "unknown type": header({"x": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}})
    + bytes(8),
    "another type": header({"x": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}})
    + bytes(8),
    "another shape": header({"x": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}})
    + bytes(8),
    "another name": header({"y": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
    + bytes(8),
    "giant shape": header({"x": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 8]}})
    + bytes(8),
}


@pytest.mark.parametrize("content", HOSTILE)
def test_a_hostile_file_with_a_valid_digest_is_damage(content):
    with pytest.raises(DamagedCheckpointError, match="here"):
        unpack_tensors(HOSTILE[content], EXPECTED, where="here")


def test_an_unknown_type_is_damage():
    data = header({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}) + bytes(2)
    expected = {"x": TensorEntry(file=FILE, dtype="F4", shape=[4])}
    with pytest.raises(DamagedCheckpointError, match="known are"):
        unpack_tensors(data, expected, where="here")


@given(st.binary(max_size=120))
@settings(max_examples=300)
def test_arbitrary_bytes_are_damage(data):
    with pytest.raises(DamagedCheckpointError):
        unpack_tensors(data, EXPECTED, where="here")
