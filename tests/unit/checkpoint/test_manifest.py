"""A manifest may hold anything at all: the answer is a manifest or a `CheckpointError`."""

import copy
import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.checkpoint import load_one, save
from stretto.checkpoint.manifest import (
    SCHEMA_VERSION,
    DamagedError,
    FileEntry,
    Manifest,
    TensorEntry,
    decode,
    encode,
    seal_of,
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


def places(value, path=()):
    """Return the path of every value inside a JSON tree, the tree itself included."""
    inner = enumerate(value) if isinstance(value, list) else ()
    inner = value.items() if isinstance(value, dict) else inner
    return [path, *(place for key, child in inner for place in places(child, (*path, key)))]


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


def test_a_manifest_survives_its_json():
    assert decode(encode(MANIFEST), where="here") == MANIFEST


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
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
def test_what_cannot_be_true_is_damage_and_its_place_is_named(place, value, complaint):
    edited = changed(json.loads(encode(MANIFEST)), place, value)
    with pytest.raises(DamagedError, match=complaint):
        decode(json.dumps(edited).encode(), where="here")


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_are_damage(data):
    with pytest.raises(DamagedError, match="here"):
        decode(data, where="here")


@pytest.fixture(scope="module")
def sealed(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run") / "checkpoints", state_at(1), generation=0).path


@given(data=st.data(), value=JSON)
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_an_edit_with_a_right_seal_is_a_checkpoint_error_or_leaves_the_tensors_alone(
    sealed, tmp_path, data, value
):
    path = tmp_path / "edited"
    if not path.exists():
        shutil.copytree(sealed, path)
    tree = json.loads((sealed / "manifest.json").read_bytes())
    place = data.draw(st.sampled_from(places(tree)))
    edited = json.dumps(changed(tree, place, value)).encode()
    (path / "manifest.json").write_bytes(edited)
    (path / "manifest.sha256").write_bytes(seal_of(edited))
    try:
        state = load_one(path)
    except CheckpointError:
        return
    expected = state_at(1).tensors
    assert {name: bits(tensor) for name, tensor in state.tensors.items()} == {
        name: bits(tensor) for name, tensor in expected.items()
    }
