import pytest
from pydantic import TypeAdapter, ValidationError

from stretto.data import DataConfig, Shapes, ShapesConfig, Text, TextConfig, open_source

TABLE = TypeAdapter(DataConfig)


def test_the_kind_of_a_table_chooses_its_config():
    assert isinstance(TABLE.validate_python({"kind": "shapes"}), ShapesConfig)
    assert isinstance(TABLE.validate_python({"kind": "text", "path": "a"}), TextConfig)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValidationError, match="shapes"):
        TABLE.validate_python({"kind": "shape"})


def test_a_config_opens_its_own_source(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 1000)
    assert isinstance(open_source(ShapesConfig(), train=True), Shapes)
    assert isinstance(open_source(TextConfig(path=str(path)), train=True), Text)


def test_train_chooses_the_split():
    config = ShapesConfig(samples=7, test_samples=5)
    assert [open_source(config, train=t).num_samples for t in (True, False)] == [7, 5]
