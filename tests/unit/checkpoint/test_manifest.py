"""Decoding any bytes gives a manifest or a `CheckpointError`."""

import copy
import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.checkpoint import load_checkpoint, save_checkpoint
from stretto.checkpoint.manifest import (
    SCHEMA_VERSION,
    DamagedCheckpointError,
    FileEntry,
    Manifest,
    TensorEntry,
    decode_manifest,
    encode_manifest,
    manifest_digest_line,
)
from stretto.errors import CheckpointError
from tests.unit.checkpoint.saver import bits, state_at

FILE = "tensors-00000.safetensors"
MANIFEST = Manifest(
    schema_version=SCHEMA_VERSION,
    step=3,
    generation=1,
    facts={"lr": 0.1, "note": None, "list": [1, [2.5, "x"]]},
    files={FILE: FileEntry(num_bytes=10, xxh3_128="0" * 32)},
    tensors={"model/w": TensorEntry(file=FILE, dtype="F32", shape=[2, 3])},
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["../x", "/etc/passwd", FILE, "F32", "F4", "0" * 32]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def paths_in(value, path=()):
    """Return the path of every value inside a JSON tree, the tree itself included."""
    inner = enumerate(value) if isinstance(value, list) else ()
    inner = value.items() if isinstance(value, dict) else inner
    return [path, *(each for key, child in inner for each in paths_in(child, (*path, key)))]


def changed(tree, path, value):
    """Return the tree with the value at ``path`` replaced."""
    if not path:
        return value
    tree = copy.deepcopy(tree)
    inside = tree
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return tree


def test_a_manifest_survives_encoding_and_decoding():
    assert decode_manifest(encode_manifest(MANIFEST), where="here") == MANIFEST


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("schema_version",), 0, "schema version 0"),
        (("schema_version",), True, "'schema_version'"),
        (("step",), -1, "'step'"),
        (("step",), 1.0, "'step'"),
        (("generation",), -1, "'generation'"),
        (("facts",), [], "'facts'"),
        (("more",), 1, "'more'"),
        (("files", FILE, "num_bytes"), -1, "num_bytes"),
        (("files", FILE, "xxh3_128"), "A" * 32, "xxh3_128"),
        (
            ("files", "tensors-00001.safetensors"),
            {"num_bytes": 0, "xxh3_128": "0" * 32},
            "no tensor",
        ),
        (("tensors", "model/w", "file"), "tensors-00001.safetensors", "unlisted file"),
        (("tensors", "model/w", "file"), "../x", "model/w.file"),
        (("tensors", "model/w", "file"), "/etc/passwd", "model/w.file"),
        (("tensors", "model/w", "file"), f"{FILE}\n", "model/w.file"),
        (("tensors", "model/w", "shape"), [2, -3], "shape"),
        (("tensors", "model/w", "shape"), [2**31, 2**31], "shape"),
        (("tensors", "model/w", "shape"), [0, 2**62], "shape"),
        (("tensors", "model/w", "shape"), [1] * 65, "shape"),
    ],
)
def test_an_impossible_value_is_damage_and_its_location_is_named(path, value, complaint):
    edited = changed(json.loads(encode_manifest(MANIFEST)), path, value)
    with pytest.raises(DamagedCheckpointError, match=complaint):
        decode_manifest(json.dumps(edited).encode(), where="here")


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_are_damage(data):
    with pytest.raises(DamagedCheckpointError, match="here"):
        decode_manifest(data, where="here")


@pytest.fixture(scope="module")
def saved_checkpoint(tmp_path_factory):
    return save_checkpoint(
        tmp_path_factory.mktemp("run") / "checkpoints", state_at(1), generation=0
    ).path


@given(data=st.data(), value=JSON)
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_an_edit_with_a_valid_digest_is_a_checkpoint_error_or_keeps_the_tensors(
    saved_checkpoint, tmp_path, data, value
):
    folder = tmp_path / "edited"
    if not folder.exists():
        shutil.copytree(saved_checkpoint, folder)
    tree = json.loads((saved_checkpoint / "manifest.json").read_bytes())
    path = data.draw(st.sampled_from(paths_in(tree)))
    edited = json.dumps(changed(tree, path, value)).encode()
    (folder / "manifest.json").write_bytes(edited)
    (folder / "manifest.sha256").write_bytes(manifest_digest_line(edited))
    try:
        state = load_checkpoint(folder)
    except CheckpointError:
        return
    expected = state_at(1).tensors
    assert {name: bits(tensor) for name, tensor in state.tensors.items()} == {
        name: bits(tensor) for name, tensor in expected.items()
    }
