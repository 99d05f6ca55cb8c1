import pytest
import torch
from pydantic import TypeAdapter

from stretto.models import (
    AlexNetConfig,
    CNNConfig,
    CustomConfig,
    GPTConfig,
    LibraryConfig,
    ModelConfig,
    ResNetConfig,
    VGGConfig,
    build_model,
)

TABLE = TypeAdapter(ModelConfig)


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ({"kind": "cnn"}, CNNConfig),
        ({"kind": "resnet", "depth": 34}, ResNetConfig),
        ({"kind": "alexnet"}, AlexNetConfig),
        ({"kind": "vgg", "depth": 19}, VGGConfig),
        ({"kind": "gpt"}, GPTConfig),
        ({"kind": "library", "name": "timm:resnet50"}, LibraryConfig),
        ({"kind": "custom", "target": "a:b", "options": {"n": [1, 2]}}, CustomConfig),
    ],
)
def test_the_kind_of_a_table_chooses_its_config(table, kind):
    assert isinstance(TABLE.validate_python(table), kind)


def test_the_model_is_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        model = build_model(CNNConfig(), seed=0)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
