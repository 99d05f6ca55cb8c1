"""A run's weights without its head, in a file that another run begins with."""

import pytest
import torch
from safetensors.torch import save_file

from stretto.checkpoint import State, load_backbone, save
from stretto.errors import CheckpointError, ConfigError
from stretto.model import CNNConfig, ResNetConfig, build_model
from stretto.model.names import from_torchvision
from stretto.train.export import export_backbone
from stretto.train.finetune import InitConfig, check_init, taken_names
from tests.unit.model.test_names import torchvision_names

CONFIG = CNNConfig(width=2, classes=8, norm="batch")


def saved(folder, config=CONFIG, fixed=None):
    """Return a run's folder with one checkpoint, and the model in it."""
    model = build_model(config, seed=0)
    table = config.model_dump(mode="json")
    facts = {"fixed": {f"model.{key}": value for key, value in table.items()} | {"run.seed": 0}}
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    beside = {"optimizer/x": torch.zeros(1)}
    state = State(3, tensors | beside, facts if fixed is None else {"fixed": fixed})
    save(folder / "checkpoints", state, generation=0)
    return folder, model


@pytest.fixture
def exported(tmp_path):
    run, model = saved(tmp_path / "run")
    out = tmp_path / "body.safetensors"
    return export_backbone(run, out, log=pytest.fail), model


def test_the_file_holds_all_but_the_head_and_says_where_it_is_from(exported):
    told, model = exported
    found = load_backbone(told.path)
    assert found.tensors.keys() == {n for n in model.state_dict() if not n.startswith("head.")}
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in found.tensors.items())
    assert (found.model, found.head, found.step) == (CONFIG.model_dump(), ("head",), 3)


def test_what_was_done_is_told(exported):
    told, _ = exported
    assert told.source.name == "step-00000003"
    assert (told.step, told.num_tensors, told.head) == (3, 18, ("head",))
    assert told.num_bytes == told.path.stat().st_size


def test_a_file_that_is_there_is_left_alone(exported, tmp_path):
    told, _ = exported
    before = told.path.read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        export_backbone(tmp_path / "run", told.path, log=pytest.fail)
    assert told.path.read_bytes() == before


def test_a_name_that_could_not_be_begun_with_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"body\.pt: a backbone file's name ends in \.safeten"):
        export_backbone(tmp_path, tmp_path / "body.pt", log=pytest.fail)


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({}, "model"),
        ({"model.kind": "cnn", "model.widht": 3}, r"model\.widht: Extra inputs"),
    ],
)
def test_a_checkpoint_that_tells_no_model_is_refused(fixed, said, tmp_path):
    run, _ = saved(tmp_path / "run", fixed=fixed)
    with pytest.raises(CheckpointError, match=rf"does not tell a model table .*: {said}"):
        export_backbone(run, tmp_path / "body.safetensors", log=pytest.fail)


def test_a_model_without_a_last_layer_is_refused(tmp_path):
    fixed = {"model.kind": "custom", "model.target": "torch.nn:Flatten"}
    run, _ = saved(tmp_path / "run", fixed=fixed)
    with pytest.raises(CheckpointError, match="no last layer is found"):
        export_backbone(run, tmp_path / "body.safetensors", log=pytest.fail)


def test_the_head_of_a_backbone_file_is_fresh_by_itself():
    model, stored = {"body.w": [2], "head.w": [5, 2]}, {"body.w": [2]}
    assert taken_names(model, stored, (), ["head"]) == ["body.w"]
    assert taken_names(model, stored, ["head.*"], ["head"]) == ["body.w"]


def test_what_else_does_not_fit_is_still_named_and_the_head_is_not_asked_for():
    model, stored = {"body.w": [2], "neck.w": [3], "head.w": [5, 2]}, {"body.w": [2]}
    with pytest.raises(ConfigError, match=r'not in the checkpoint; .* init\.fresh=\["neck\.\*"\]$'):
        taken_names(model, stored, (), ["head"])


def test_another_width_is_refused_with_both_shapes(exported):
    told, _ = exported
    model = build_model(CNNConfig(width=3, norm="batch"), seed=0)
    with pytest.raises(ConfigError, match=r"init\.checkpoint = .*blocks\.0\.0\.weight is \[3, 3"):
        check_init(InitConfig(checkpoint=str(told.path)), model, log=pytest.fail)


def test_a_torn_file_is_refused_with_its_key(exported):
    told, model = exported
    told.path.write_bytes(told.path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"init\.checkpoint = .* is not a safetensors file"):
        check_init(InitConfig(checkpoint=str(told.path)), model, log=pytest.fail)


def test_a_file_of_somebody_elses_must_fit_like_a_checkpoint(tmp_path):
    model = build_model(CONFIG, seed=0)
    path = tmp_path / "other.safetensors"
    save_file(build_model(CONFIG, seed=1).state_dict(), path)
    check_init(InitConfig(checkpoint=str(path)), model, log=pytest.fail)
    save_file(build_model(CNNConfig(width=2, norm="batch", classes=5), seed=1).state_dict(), path)
    with pytest.raises(ConfigError, match=r'init\.fresh=\["head\.\*"\]'):
        check_init(InitConfig(checkpoint=str(path)), model, log=pytest.fail)


def test_a_residual_networks_file_may_have_torchvisions_names(tmp_path):
    config = ResNetConfig(depth=18, width=1, stem="imagenet")
    ours = build_model(config, seed=0).state_dict()
    theirs = {name: name for name in torchvision_names(18)}
    renamed = {name: ours[place].clone() for place, name in from_torchvision(theirs).items()}
    save_file(renamed, tmp_path / "theirs.safetensors")
    init = InitConfig(checkpoint=str(tmp_path / "theirs.safetensors"))
    check_init(init, build_model(config, seed=1), log=pytest.fail)
