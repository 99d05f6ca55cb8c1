import pytest
import torch
from pydantic import TypeAdapter

from stretto.model import CNNConfig, CustomConfig, GPTConfig, ModelConfig, ResNetConfig, build_model

TABLE = TypeAdapter(ModelConfig)


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ({"kind": "cnn"}, CNNConfig),
        ({"kind": "resnet", "depth": 34}, ResNetConfig),
        ({"kind": "gpt"}, GPTConfig),
        ({"kind": "custom", "target": "a:b", "options": {"n": [1, 2]}}, CustomConfig),
    ],
)
def test_the_kind_of_a_table_chooses_its_config(table, kind):
    assert isinstance(TABLE.validate_python(table), kind)


def test_the_model_is_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        model = build_model(CNNConfig(), seed=0)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
