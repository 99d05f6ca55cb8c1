"""Initial weights from an earlier run: which are loaded, what is refused, on every rank."""

import re
import shutil
import tomllib

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from stretto.checkpoint import CheckpointState, load_newest, save_checkpoint
from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load, to_toml
from stretto.errors import ConfigError
from stretto.run import RunConfig, assemble, fixed_settings, flat_settings, prepare, settings_digest
from stretto.train.finetune import (
    InitConfig,
    check_init,
    export_backbone,
    init_from_checkpoint,
    loadable_names,
)
from stretto.train.loop import train
from stretto.train.state import resume_state

SETTINGS = [
    "data.samples=24",
    "data.test_samples=4",
    "data.size=8",
    "model.width=4",
    "train.batch=12",
    "train.steps=2",
    "optim.lr=0.01",
]
NEW_HEAD = ["model.classes=3", "data.classes=3", "run.seed=9"]
HEAD = 'init.newly_initialised=["head.*"]'


def parts_of(transport, folder, *settings, name="run"):
    where = [f"run.folder={folder}", f"run.name={name}"]
    loaded = load(RunConfig, None, [*SETTINGS, *where, *settings])
    world = World(transport.rank, Mesh((transport.size,)))
    prepared = prepare(loaded.config)
    parts = assemble(loaded, prepared, world, transport, lambda event: None)
    return loaded.config, parts


def trained(transport, folder, *settings, name="run"):
    _, parts = parts_of(transport, folder, *settings, name=name)
    train(parts)
    parts.strategy.close()
    return parts


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """Return a run's folder, not to be changed, and its final weights."""
    folder = tmp_path_factory.mktemp("earlier")
    run_threads(1, lambda c: trained(c, folder))
    state = load_newest(folder / "run" / "checkpoints", log=pytest.fail)
    return folder / "run", state.tensors_under("model")


def initialised(transport, folder, *settings):
    """Return the note and the weights of a run after loading initial weights, before training."""
    config, parts = parts_of(transport, folder, *settings, name="tuned")
    try:
        start = init_from_checkpoint(parts, config.init, log=pytest.fail)
        return start.note, {k: v.clone() for k, v in parts.model.state_dict().items()}
    finally:
        parts.strategy.close()


shapes = st.dictionaries(
    st.sampled_from(["a.w", "a.b", "b.w", "b.c.w", "b.c.v", "head.w", "head.b", "w"]),
    st.sampled_from([(1,), (2,), (2, 3)]),
    max_size=8,
)


@given(model=shapes, stored=shapes)
def test_a_refusal_suggests_the_setting_that_loads_everything_that_fits(model, stored):
    equal_names = [name for name in model if stored.get(name) == model[name]]
    assume(equal_names)
    try:
        loaded = loadable_names(model, stored, ())
    except ConfigError as wrong:
        line = tomllib.loads(re.search(r"init\.newly_initialised=\[.*\]", str(wrong)).group())
        loaded = loadable_names(model, stored, line["init"]["newly_initialised"])
    assert loaded == equal_names


def test_a_refusal_names_both_shapes_and_keeps_declared_patterns():
    model = {"body.w": [2], "head.w": [3, 4], "head.b": [3], "extra": [1]}
    stored = {"body.w": [2], "head.w": [8, 4], "head.b": [8], "old": [5]}
    with pytest.raises(ConfigError) as refusal:
        loadable_names(model, stored, ["extra"])
    assert str(refusal.value) == (
        "head.w is [3, 4] in the model, [8, 4] in the checkpoint; "
        "head.b is [3] in the model, [8] in the checkpoint; old [5] is not in the model; "
        'to leave out what does not fit: init.newly_initialised=["extra", "head.*", "old"]'
    )


def test_a_long_list_of_mismatches_is_truncated():
    model = {"same": [1]} | {f"m{i}": [1] for i in range(9)}
    with pytest.raises(ConfigError, match=r"m3 \[1\] is not in the checkpoint; and 5 more; to"):
        loadable_names(model, {"same": [1]}, ())


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name():
    both = {"body.weight": [1], "head.weight": [2]}
    with pytest.raises(ConfigError, match=r'"haed\.weight".*did you mean "head\.weight"'):
        loadable_names(both, both, ["haed.weight"])


def test_the_checkpoint_of_another_model_is_refused():
    with pytest.raises(ConfigError, match="no tensor is left to load"):
        loadable_names({"a": [1]}, {"b": [1]}, ())


def test_patterns_that_leave_nothing_to_load_are_refused():
    with pytest.raises(ConfigError, match="no tensor is left to load"):
        loadable_names({"a": [1]}, {"a": [1]}, ["*"])


@pytest.mark.parametrize("source", ["", "checkpoints", "checkpoints/step-00000002"])
def test_a_run_folder_its_checkpoints_and_one_of_them_give_the_same_weights(
    source, earlier, tmp_path
):
    run, weights = earlier
    ((note, found),) = run_threads(
        1, lambda c: initialised(c, tmp_path, f"init.checkpoint={run / source}")
    )
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert note == f"weights from {run}/checkpoints/step-00000002, 0 tensors newly initialised"


@pytest.mark.parametrize("size", [1, 3])
def test_on_every_rank_the_head_is_new_and_the_rest_is_loaded(size, earlier, tmp_path):
    run, weights = earlier
    settings = [f"init.checkpoint={run}", HEAD, *NEW_HEAD]
    results = run_threads(size, lambda c: initialised(c, tmp_path, *settings))
    ((_, untouched),) = run_threads(1, lambda c: initialised(c, tmp_path, *NEW_HEAD))
    for note, found in results:
        assert note.endswith(", 2 tensors newly initialised")
        for name, value in found.items():
            expected = untouched if name.startswith("head.") else weights
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("size", [1, 2])
def test_a_backbone_of_8_classes_starts_a_run_of_5_with_the_same_body(size, earlier, tmp_path):
    run, weights = earlier
    out = tmp_path / "body.safetensors"
    export_backbone(run, out, log=pytest.fail)
    settings = ["model.classes=5", "data.classes=5", "run.seed=9"]
    ((_, untouched),) = run_threads(1, lambda c: initialised(c, tmp_path, *settings))
    settings.append(f"init.checkpoint={out}")
    for note, found in run_threads(size, lambda c: initialised(c, tmp_path, *settings)):
        assert note == f"weights from {out}, 2 tensors newly initialised"
        for name, value in found.items():
            expected = untouched if name.startswith("head.") else weights
            assert torch.equal(value, expected[name]), name


def test_with_8_classes_the_head_of_a_backbone_is_new_though_it_would_fit(earlier, tmp_path):
    run, weights = earlier
    out = tmp_path / "body.safetensors"
    export_backbone(run, out, log=pytest.fail)
    settings = [f"init.checkpoint={out}", "run.seed=9"]
    ((_, found),) = run_threads(1, lambda c: initialised(c, tmp_path, *settings))
    differing = {name for name in found if not torch.equal(found[name], weights[name])}
    assert differing == {"head.weight", "head.bias"}


def test_only_rank_0_needs_to_reach_the_checkpoint(earlier, tmp_path):
    run, weights = earlier

    def on_rank(transport):
        source = run if transport.rank == 0 else tmp_path / "not here"
        return initialised(transport, tmp_path, f"init.checkpoint={source}")

    for _, found in run_threads(2, on_rank):
        assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_every_rank_fails_with_the_error_of_rank_0(earlier, tmp_path):
    def on_rank(transport):
        with pytest.raises(ConfigError) as refusal:
            initialised(transport, tmp_path, f"init.checkpoint={earlier[0]}", *NEW_HEAD)
        return str(refusal.value)

    reasons = run_threads(2, on_rank)
    assert len(set(reasons)) == 1
    assert 'init.newly_initialised=["head.*"]' in reasons[0]


def test_the_error_for_a_missing_checkpoint_names_the_key(tmp_path):
    init = InitConfig(checkpoint=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"init\.checkpoint = .*none.* is not a folder"):
        check_init(init, nn.Linear(2, 2), log=pytest.fail)


def test_checking_init_changes_no_weight(earlier):
    model = prepare(load(RunConfig, None, SETTINGS).config).model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_init(InitConfig(checkpoint=str(earlier[0])), model, log=pytest.fail)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.head.weight = self.tokens.weight


def saved_untied(folder, tokens, head):
    tensors = {"model/tokens.weight": tokens, "model/head.weight": head}
    save_checkpoint(folder / "checkpoints", CheckpointState(1, tensors, {}), generation=0)
    return str(folder)


def test_two_values_for_one_tied_tensor_are_refused(tmp_path):
    source = saved_untied(tmp_path, torch.zeros(2, 2), torch.ones(2, 2))
    with pytest.raises(
        ConfigError, match=r'one tensor in the model .* init\.newly_initialised=\["head'
    ):
        check_init(InitConfig(checkpoint=source), Tied(), log=pytest.fail)
    check_init(
        InitConfig(checkpoint=source, newly_initialised=("head.*",)), Tied(), log=pytest.fail
    )


def test_a_nan_in_a_tensor_is_loaded(tmp_path):
    nan = torch.full((2, 2), float("nan"))
    source = saved_untied(tmp_path, nan, torch.ones(2, 2))
    model = nn.ModuleDict({n: nn.Linear(2, 2, bias=False) for n in ("tokens", "head")})
    check_init(InitConfig(checkpoint=source), model, log=pytest.fail)


def test_the_optimizer_and_the_step_start_anew(earlier, tmp_path):
    def on_rank(transport):
        config, parts = parts_of(transport, tmp_path, f"init.checkpoint={earlier[0]}", name="tuned")
        init_from_checkpoint(parts, config.init, log=pytest.fail)
        assert not parts.optimizer.state
        ended = train(parts)
        parts.strategy.close()
        return ended.step

    assert run_threads(1, on_rank) == [2]


def test_a_resumed_run_does_not_need_its_initial_checkpoint(earlier, tmp_path):
    source = shutil.copytree(earlier[0], tmp_path / "source")
    settings = [f"init.checkpoint={source}", HEAD, *NEW_HEAD]

    def on_rank(transport):
        config, parts = parts_of(transport, tmp_path, *settings, name="tuned")
        init_from_checkpoint(parts, config.init, log=pytest.fail)
        train(parts)
        parts.strategy.close()
        return parts

    (before,) = run_threads(1, on_rank)
    shutil.rmtree(source)

    def resumed(transport):
        _, parts = parts_of(transport, tmp_path, *NEW_HEAD, name="tuned")
        first = resume_state(parts, log=pytest.fail)
        parts.strategy.close()
        return first, parts

    ((first, after),) = run_threads(1, resumed)
    assert first == 2
    for name, value in before.model.state_dict().items():
        assert torch.equal(after.model.state_dict()[name], value)


def test_newly_initialised_without_a_checkpoint_is_refused():
    with pytest.raises(ConfigError, match="newly_initialised without checkpoint"):
        load(RunConfig, None, [HEAD])


def test_all_tables_survive_the_resolved_run_file(tmp_path):
    settings = ["init.checkpoint=runs/a", HEAD, "train.early_stop.patience=3"]
    settings.append("run.heartbeat_timeout_s=5.5")
    loaded = load(RunConfig, None, [*settings, 'run.trackers=["wandb"]', "train.epoch_samples=7"])
    (tmp_path / "resolved.toml").write_text(to_toml(loaded))
    again = load(RunConfig, tmp_path / "resolved.toml")
    assert again.config == loaded.config
    assert settings_digest(again.config) == settings_digest(loaded.config)


def test_fixed_settings_exclude_initial_weights_and_early_stopping():
    plain = load(RunConfig, None, [])
    settings = ["init.checkpoint=a", "train.early_stop.patience=3", "train.epoch_samples=7"]
    assert fixed_settings(load(RunConfig, None, settings)) == fixed_settings(plain)


def test_flat_settings_have_every_setting_that_has_a_source():
    loaded = load(RunConfig, None, ["train.early_stop.patience=3", HEAD, "init.checkpoint=a"])
    flat = flat_settings(loaded.config)
    assert flat.keys() == loaded.source.keys()
    assert (flat["train.early_stop.patience"], flat["init.newly_initialised"]) == (3, ["head.*"])
