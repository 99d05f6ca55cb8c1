"""Export of a run's weights without its head, as initial weights of another run."""

import pytest
import torch
from safetensors.torch import save_file

from stretto.checkpoint import CheckpointState, load_backbone, save_checkpoint
from stretto.errors import CheckpointError, ConfigError
from stretto.models import CNNConfig, ResNetConfig, build_model
from stretto.models.backbone import from_torchvision
from stretto.train.finetune import InitConfig, check_init, export_backbone, loadable_names
from tests.unit.models.test_names import torchvision_names

CONFIG = CNNConfig(width=2, classes=8, norm="batch")


def saved(folder, config=CONFIG, fixed=None):
    """Return a run's folder with one checkpoint, and the model in it."""
    model = build_model(config, seed=0)
    table = config.model_dump(mode="json")
    facts = {"fixed": {f"model.{key}": value for key, value in table.items()} | {"run.seed": 0}}
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    beside = {"optimizer/x": torch.zeros(1)}
    state = CheckpointState(3, tensors | beside, facts if fixed is None else {"fixed": fixed})
    save_checkpoint(folder / "checkpoints", state, generation=0)
    return folder, model


@pytest.fixture
def exported(tmp_path):
    run, model = saved(tmp_path / "run")
    out = tmp_path / "body.safetensors"
    return export_backbone(run, out, log=pytest.fail), model


def test_the_file_has_all_tensors_but_the_head_and_their_origin(exported):
    summary, model = exported
    found = load_backbone(summary.path)
    assert found.tensors.keys() == {n for n in model.state_dict() if not n.startswith("head.")}
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in found.tensors.items())
    assert (found.model, found.head, found.step) == (CONFIG.model_dump(), ("head",), 3)


def test_the_summary_describes_the_export(exported):
    summary, _ = exported
    assert summary.source.name == "step-00000003"
    assert (summary.step, summary.num_tensors, summary.head) == (3, 18, ("head",))
    assert summary.num_bytes == summary.path.stat().st_size


def test_an_existing_file_is_not_overwritten(exported, tmp_path):
    summary, _ = exported
    before = summary.path.read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        export_backbone(tmp_path / "run", summary.path, log=pytest.fail)
    assert summary.path.read_bytes() == before


def test_a_file_name_with_another_suffix_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"body\.pt: a backbone file's name ends in \.safeten"):
        export_backbone(tmp_path, tmp_path / "body.pt", log=pytest.fail)


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({}, "model"),
        ({"model.kind": "cnn", "model.widht": 3}, r"model\.widht: Extra inputs"),
    ],
)
def test_a_checkpoint_without_a_valid_model_table_is_refused(fixed, said, tmp_path):
    run, _ = saved(tmp_path / "run", fixed=fixed)
    with pytest.raises(CheckpointError, match=rf"does not hold a model table .*: {said}"):
        export_backbone(run, tmp_path / "body.safetensors", log=pytest.fail)


def test_a_model_without_a_last_layer_is_refused(tmp_path):
    fixed = {"model.kind": "custom", "model.target": "torch.nn:Flatten"}
    run, _ = saved(tmp_path / "run", fixed=fixed)
    with pytest.raises(CheckpointError, match="no last layer is found"):
        export_backbone(run, tmp_path / "body.safetensors", log=pytest.fail)


def test_the_head_of_a_backbone_file_needs_no_declaration():
    model, stored = {"body.w": [2], "head.w": [5, 2]}, {"body.w": [2]}
    assert loadable_names(model, stored, (), ["head"]) == ["body.w"]
    assert loadable_names(model, stored, ["head.*"], ["head"]) == ["body.w"]


def test_other_mismatches_are_named_but_not_the_head():
    model, stored = {"body.w": [2], "neck.w": [3], "head.w": [5, 2]}, {"body.w": [2]}
    with pytest.raises(
        ConfigError, match=r'not in the checkpoint; .* init\.newly_initialised=\["neck\.\*"\]$'
    ):
        loadable_names(model, stored, (), ["head"])


def test_another_width_is_refused_with_both_shapes(exported):
    summary, _ = exported
    model = build_model(CNNConfig(width=3, norm="batch"), seed=0)
    with pytest.raises(ConfigError, match=r"init\.checkpoint = .*blocks\.0\.0\.weight is \[3, 3"):
        check_init(InitConfig(checkpoint=str(summary.path)), model, log=pytest.fail)


def test_the_error_for_a_truncated_file_names_the_key(exported):
    summary, model = exported
    summary.path.write_bytes(summary.path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"init\.checkpoint = .* is not a safetensors file"):
        check_init(InitConfig(checkpoint=str(summary.path)), model, log=pytest.fail)


def test_a_file_of_another_program_must_fit_like_a_checkpoint(tmp_path):
    model = build_model(CONFIG, seed=0)
    path = tmp_path / "other.safetensors"
    save_file(build_model(CONFIG, seed=1).state_dict(), path)
    check_init(InitConfig(checkpoint=str(path)), model, log=pytest.fail)
    save_file(build_model(CNNConfig(width=2, norm="batch", classes=5), seed=1).state_dict(), path)
    with pytest.raises(ConfigError, match=r'init\.newly_initialised=\["head\.\*"\]'):
        check_init(InitConfig(checkpoint=str(path)), model, log=pytest.fail)


def test_a_file_for_a_resnet_may_have_torchvision_names(tmp_path):
    config = ResNetConfig(depth=18, width=1, stem="imagenet")
    ours = build_model(config, seed=0).state_dict()
    theirs = {name: name for name in torchvision_names(18)}
    renamed = {theirs: ours[name].clone() for name, theirs in from_torchvision(theirs).items()}
    save_file(renamed, tmp_path / "theirs.safetensors")
    init = InitConfig(checkpoint=str(tmp_path / "theirs.safetensors"))
    check_init(init, build_model(config, seed=1), log=pytest.fail)
