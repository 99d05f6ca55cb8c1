"""Checkpoints restore the same bits, and nothing is ever unpickled."""

import ast
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stretto.errors
from stretto.checkpoint import CheckpointState, load_newest, save_checkpoint
from stretto.checkpoint import tensor_files as shards
from tests.unit.checkpoint.saver import assert_same

SOURCE = Path(stretto.errors.__file__).parent
PRINTABLE = st.characters(exclude_categories=("C", "Z"))
NAMES = st.text(PRINTABLE, min_size=1, max_size=30)
FACTS = st.dictionaries(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**200), 2**200)
        | st.floats(allow_nan=False)
        | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=10,
    ),
    max_size=5,
)


@st.composite
def tensors(draw, dtype):
    """Draw a tensor of any bits, possibly without elements, possibly not contiguous."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(high, (num_bytes,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype).reshape(shape)
    return tensor.permute(draw(st.permutations(range(len(shape)))))


@pytest.mark.parametrize("code", shards.DTYPES)
@given(data=st.data())
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_dtype_and_shape_is_restored_bit_for_bit(tmp_path, code, data):
    one = tensors(shards.DTYPES[code])
    some = data.draw(st.dictionaries(NAMES, one, max_size=4))
    state = CheckpointState(data.draw(st.integers(0, 10**9)), some, data.draw(FACTS))
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    save_checkpoint(folder, state, generation=0)
    assert_same(load_newest(folder, log=pytest.fail), state)


def test_infinite_and_nan_facts_are_restored(tmp_path):
    facts = {"best": float("inf"), "worst": float("-inf"), "loss": float("nan")}
    save_checkpoint(tmp_path / "c", CheckpointState(0, {}, facts), generation=0)
    found = load_newest(tmp_path / "c", log=pytest.fail)
    assert found is not None
    assert repr(found.facts) == repr(facts)


UNPICKLING_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "joblib"}
UNPICKLING_NAMES = {
    ("torch", "load"),
    ("torch", "save"),
    ("dist", "all_gather_object"),
    ("dist", "broadcast_object_list"),
    ("dist", "gather_object"),
    ("dist", "scatter_object_list"),
    ("dist", "recv_object_list"),
}


def unpickling(source: str) -> list[str]:
    """Return the locations in ``source`` that could pickle or unpickle something."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            names = {("torch", alias.name) for alias in node.names if node.module == "torch"}
            names |= {("dist", alias.name) for alias in node.names}
            modules += ["pickle"] if names & UNPICKLING_NAMES else []
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            modules = ["pickle"] if (node.value.id, node.attr) in UNPICKLING_NAMES else []
        else:
            continue
        if any(module.split(".")[0] in UNPICKLING_MODULES for module in modules):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize(
    "hole",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
    ],
)
def test_the_search_for_pickle_finds_uses_of_it(hole):
    assert unpickling(hole)


def test_nothing_in_the_library_pickles_or_unpickles():
    found = {
        str(path.relative_to(SOURCE)): places
        for path in sorted(SOURCE.rglob("*.py"))
        if (places := unpickling(path.read_text()))
    }
    assert found == {}
