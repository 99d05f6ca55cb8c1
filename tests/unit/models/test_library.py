"""Models of other libraries: with fake libraries first, then with the real ones."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from stretto.errors import ConfigError
from stretto.models import LibraryConfig, build_model, head_layer_names
from tests.unit.models.library_models import real


class Answer:
    def __init__(self, logits):
        self.logits = logits
        self.past_key_values = "not wanted"


class Chatty(nn.Linear):
    """A model that returns more than logits."""

    def forward(self, x):
        return Answer(super().forward(x))


class FakeText:
    def __init__(self, vocab_size=7, width=3, use_cache=True):
        self.vocab_size, self.width, self.use_cache = vocab_size, width, use_cache


class FakeImages:
    def __init__(self, num_labels=2, width=3):
        self.num_labels, self.width = num_labels, width


class FakeSpeech:
    pass


def fake_timm(asked):
    def create_model(name, *, pretrained, num_classes=4, **options):
        asked.append((name, pretrained, options))
        return nn.Linear(options.get("width", 3), num_classes)

    names = ["resnet18", "resnet50", "vit_tiny"]
    return {
        "is_model": names.__contains__,
        "list_models": lambda: names,
        "create_model": create_model,
    }


def fake_torchvision(asked):
    def get_model(name, *, weights, num_classes=4, **options):
        asked.append((name, weights, options))
        return nn.Linear(options.get("width", 3), num_classes)

    models = SimpleNamespace(get_model=get_model)
    images, others = ["resnet18", "vgg16"], ["fcn_resnet50"]
    models.list_models = lambda module=None: images if module is models else images + others
    return {"models": models}


def fake_transformers(asked):
    configs = {"gpt2": FakeText, "vit": FakeImages, "whisper": FakeSpeech}

    def text(config):
        asked.append(vars(config))
        return Chatty(config.width, config.vocab_size)

    def images(config):
        asked.append(vars(config))
        return Chatty(config.width, config.num_labels)

    return {
        "CONFIG_MAPPING": configs,
        "AutoConfig": SimpleNamespace(for_model=lambda name, **kw: configs[name](**kw)),
        "MODEL_FOR_CAUSAL_LM_MAPPING": {FakeText: None},
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING": {FakeImages: None},
        "AutoModelForCausalLM": SimpleNamespace(from_config=text),
        "AutoModelForImageClassification": SimpleNamespace(from_config=images),
    }


FAKES = {
    "timm": fake_timm,
    "torchvision": fake_torchvision,
    "transformers": fake_transformers,
}


@pytest.fixture
def asked(monkeypatch):
    """Replace all three libraries by fakes; return the list of the calls that they receive."""
    calls = []
    for library, contents in FAKES.items():
        module = ModuleType(library)
        vars(module).update(contents(calls))
        monkeypatch.setitem(sys.modules, library, module)
    return calls


def built(name, classes=None, **options):
    return build_model(LibraryConfig(name=name, classes=classes, options=options), seed=0)


def test_timm_is_asked_for_a_model_without_weights(asked):
    model = built("timm:resnet50", classes=9, width=5)
    assert asked == [("resnet50", False, {"width": 5})]
    assert model(torch.zeros(2, 5)).shape == (2, 9)


def test_torchvision_is_asked_for_a_model_without_weights(asked):
    model = built("torchvision:vgg16", classes=9, width=5)
    assert asked == [("vgg16", None, {"width": 5})]
    assert model(torch.zeros(2, 5)).shape == (2, 9)


def test_a_language_model_has_its_classes_as_vocabulary_and_keeps_no_cache(asked):
    model = built("transformers:gpt2", classes=9, width=5)
    assert asked == [{"vocab_size": 9, "width": 5, "use_cache": False}]
    assert model(torch.zeros(2, 5)).shape == (2, 9)


def test_an_image_model_of_transformers_has_its_classes_as_labels(asked):
    model = built("transformers:vit", classes=9, width=5)
    assert asked == [{"num_labels": 9, "width": 5}]
    assert model(torch.zeros(2, 5)).shape == (2, 9)


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("name", "length"),
    [("timm:resnet18", 4), ("torchvision:vgg16", 4), ("transformers:gpt2", 7)],
)
def test_without_classes_the_length_is_the_librarys(name, length):
    assert built(name)(torch.zeros(1, 3)).shape == (1, length)


@pytest.mark.usefixtures("asked")
def test_the_models_own_names_stay_as_they_are():
    assert list(built("transformers:gpt2").state_dict()) == ["weight", "bias"]


@pytest.mark.usefixtures("asked")
def test_weights_follow_from_the_seed_and_nothing_else_is_drawn():
    config = LibraryConfig(name="timm:resnet18")
    before = torch.get_rng_state()
    first, same, other = (build_model(config, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.weight, same.weight)
    assert not torch.equal(first.weight, other.weight)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("timm:resnet5O", "resnet50"),
        ("torchvision:vgg61", "vgg16"),
        ("transformers:gpt-2", "gpt2"),
    ],
)
def test_an_unknown_model_is_refused_with_the_nearest_name(name, near):
    with pytest.raises(ConfigError, match=f'has no such model; did you mean "{near}"'):
        built(name)


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("name", ["torchvision:fcn_resnet50", "transformers:whisper"])
def test_a_model_that_neither_classifies_nor_continues_text_is_refused(name):
    with pytest.raises(ConfigError, match=f"model.name = '{name}'"):
        built(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tim:resnet50", 'did you mean "timm"'),
        ("resnet50", 'expected one of "timm:...", "torchvision:...", "transformers:..."'),
        ("timm:", "expected one of"),
    ],
)
def test_a_name_without_a_library_is_refused(name, message):
    with pytest.raises(ValidationError, match=message.replace("...", r"\.\.\.")):
        LibraryConfig(name=name)


@pytest.mark.parametrize("option", ["pretrained", "weights", "weights_backbone", "checkpoint_path"])
def test_an_option_that_would_load_weights_is_refused(option):
    with pytest.raises(ValidationError, match=rf"{option} would load weights.*init\.checkpoint"):
        LibraryConfig(name="timm:resnet50", options={option: True})


@pytest.mark.usefixtures("asked")
def test_an_option_that_transformers_would_never_read_is_refused():
    with pytest.raises(ConfigError, match=r'model\.options\.widht.*did you mean "width"'):
        built("transformers:gpt2", widht=5)


@pytest.mark.usefixtures("asked")
def test_two_lengths_of_one_output_are_refused():
    with pytest.raises(ConfigError, match=r"model\.classes = 9 and model\.options\.num_classes"):
        built("timm:resnet18", classes=9, num_classes=8)


@pytest.mark.usefixtures("asked")
def test_a_failure_of_the_library_is_reported_in_one_line():
    with pytest.raises(
        ConfigError, match=r"'timm:resnet18' with .* failed: TypeError: .*"
    ) as caught:
        built("timm:resnet18", width="wide\nand long")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("library", FAKES)
def test_a_library_that_is_not_installed_is_named_with_its_extra(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf'pip install "stretto\[{library}\]"'):
        built(f"{library}:resnet50")


def test_a_missing_dependency_of_a_library_is_named(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    (tmp_path / "timm.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="not_installed_anywhere, which timm needs, is not inst"):
        built("timm:resnet50")


def test_a_library_built_for_another_torch_is_reported_as_such(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator nms does not exist')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="nms does not exist; it must be one made for torch 2"):
        built("torchvision:resnet18")


def test_an_output_without_logits_is_refused(asked, monkeypatch):
    monkeypatch.setattr(sys.modules["timm"], "create_model", lambda *_, **__: nn.LSTM(3, 3))
    with pytest.raises(ConfigError, match="returns tuple, which has no logits"):
        built("timm:resnet18")(torch.zeros(2, 3))


REAL = {
    "timm:resnet18": ({}, "fc", (3, 64, 64)),
    "timm:deit_tiny_distilled_patch16_224": ({"img_size": 32}, "head head_dist", (3, 32, 32)),
    "torchvision:mobilenet_v3_small": ({}, "classifier.3", (3, 64, 64)),
    "transformers:gpt2": ({"n_layer": 1, "n_embd": 8, "n_head": 2}, "lm_head", None),
    "transformers:llama": (
        {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
        },
        "lm_head",
        None,
    ),
    "transformers:vit": (
        {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
            "image_size": 16,
        },
        "classifier",
        (3, 16, 16),
    ),
}


@pytest.mark.filterwarnings("ignore")  # the libraries warn about themselves
@pytest.mark.parametrize("name", REAL)
def test_a_real_model_returns_logits_and_has_a_head(name):
    real(name.partition(":")[0])
    options, heads, image = REAL[name]
    model = built(name, classes=11, **options)
    inputs = torch.zeros(2, 4).long() if image is None else torch.zeros(2, *image)
    assert model(inputs).shape == ((2, 4, 11) if image is None else (2, 11))
    assert head_layer_names(model) == tuple(heads.split())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", FAKES)
def test_a_real_library_suggests_the_nearest_model(library):
    real(library)
    name = {"timm": "resnet5O", "torchvision": "resnet5O", "transformers": "gpt_2"}[library]
    with pytest.raises(ConfigError, match="has no such model; did you mean"):
        built(f"{library}:{name}")
