import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from stretto.data import (
    DataConfig,
    HostContext,
    ImageFolder,
    ImagesConfig,
    ReadStatistics,
    Shapes,
    ShapesConfig,
    Text,
    TextConfig,
    open_sample_source,
)
from tests.unit.data.images.pictures import data_folder

TABLE = TypeAdapter(DataConfig)


def test_the_kind_of_a_table_selects_its_config():
    assert isinstance(TABLE.validate_python({"kind": "shapes"}), ShapesConfig)
    assert isinstance(TABLE.validate_python({"kind": "text", "path": "a"}), TextConfig)
    assert isinstance(TABLE.validate_python({"kind": "images", "path": "a"}), ImagesConfig)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValidationError, match="shapes"):
        TABLE.validate_python({"kind": "shape"})


def test_each_config_opens_its_own_source(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 1000)
    assert isinstance(open_sample_source(ShapesConfig(), train=True), Shapes)
    assert isinstance(open_sample_source(TextConfig(path=str(path)), train=True), Text)
    folder = data_folder(tmp_path / "images")
    assert isinstance(open_sample_source(ImagesConfig(path=str(folder)), train=True), ImageFolder)


def test_train_selects_the_split():
    config = ShapesConfig(samples=7, test_samples=5)
    assert [open_sample_source(config, train=t).num_samples for t in (True, False)] == [7, 5]


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 1000)
    return path


@pytest.mark.parametrize("kind", ["shapes", "text"])
def test_start_and_close_do_nothing_for_a_source_without_processes(kind, text_file):
    config = ShapesConfig() if kind == "shapes" else TextConfig(path=str(text_file))
    source = open_sample_source(config, train=True)
    source.start(HostContext(0, 1, "run", barrier=pytest.fail))
    source.batch(np.arange(3), 7)
    source.close()
    source.close()
    assert source.take_statistics() == ReadStatistics()


@pytest.mark.parametrize(
    ("other", "train"),
    [
        (ShapesConfig(), False),
        (ShapesConfig(seed=1), True),
        (ShapesConfig(samples=100), True),
    ],
)
def test_other_settings_of_generated_images_change_the_fingerprint(other, train):
    fingerprint = open_sample_source(ShapesConfig(), train=True).fingerprint
    assert fingerprint == open_sample_source(ShapesConfig(), train=True).fingerprint
    assert fingerprint != open_sample_source(other, train=train).fingerprint


@pytest.mark.parametrize("position", [0, 1000, -1000, -1])
def test_a_changed_byte_near_an_end_of_a_text_changes_its_fingerprint(text_file, position):
    config = TextConfig(path=str(text_file))
    before = open_sample_source(config, train=True).fingerprint
    content = bytearray(text_file.read_bytes())
    content[position] ^= 1
    text_file.write_bytes(content)
    assert open_sample_source(config, train=True).fingerprint != before


def test_a_copy_of_a_text_has_the_same_fingerprint(text_file):
    copy = text_file.with_name("copy.txt")
    copy.write_bytes(text_file.read_bytes())
    first, second = (
        open_sample_source(TextConfig(path=str(path)), train=True).fingerprint
        for path in (text_file, copy)
    )
    assert first == second


@pytest.mark.parametrize("change", [{"context": 32}, {"held_out": 0.5}])
def test_another_split_of_a_text_changes_its_fingerprint(text_file, change):
    config = TextConfig(path=str(text_file))
    other = TextConfig(path=str(text_file), **change)
    assert (
        open_sample_source(config, train=True).fingerprint
        != open_sample_source(other, train=True).fingerprint
    )
