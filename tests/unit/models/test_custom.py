import sys

import pytest
import torch
from torch import nn

from stretto.errors import ConfigError
from stretto.models import CustomConfig, build_model

MODULE = """
from torch import nn

NUMBER = 3

def make(width=2):
    return nn.Linear(width, 1)

def number():
    return 3
"""


@pytest.fixture
def user_models(tmp_path, monkeypatch):
    (tmp_path / "user_models.py").write_text(MODULE)
    (tmp_path / "needy_models.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("user_models", None)


@pytest.mark.usefixtures("user_models")
def test_the_target_is_called_with_the_options():
    model = build_model(CustomConfig(target="user_models:make", options={"width": 5}), seed=0)
    assert isinstance(model, nn.Linear)
    assert model.in_features == 5


def test_a_class_is_a_target_too():
    config = CustomConfig(
        target="torch.nn:Linear", options={"in_features": 3, "out_features": 2, "bias": False}
    )
    assert build_model(config, seed=0)(torch.zeros(1, 3)).shape == (1, 2)


@pytest.mark.usefixtures("user_models")
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("user_models.make", "names no function"),
        ("user_models:", "names no function"),
        (":make", "names no function"),
        ("absent_models:make", "no module 'absent_models'"),
        ("user_models.deeper:make", "no module 'user_models.deeper'"),
        ("needy_models:make", "no module 'not_installed_anywhere'"),
        ("user_models:mak", "has no 'mak'"),
        ("user_models:NUMBER", "is a int"),
        ("user_models:number", "returned int"),
    ],
)
def test_an_invalid_target_is_refused_with_the_reason(target, message):
    with pytest.raises(ConfigError, match=rf"model\.target = '{target}'.*{message}"):
        build_model(CustomConfig(target=target), seed=0)


@pytest.mark.usefixtures("user_models")
def test_an_option_that_the_function_does_not_take_is_refused():
    config = CustomConfig(target="user_models:make", options={"widht": 5})
    with pytest.raises(ConfigError, match=r"model\.options.*'widht'"):
        build_model(config, seed=0)
