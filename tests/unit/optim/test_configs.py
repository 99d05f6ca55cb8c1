"""The [optim] tables: the optimizers they build, their errors, and the derived rules."""

import pytest
import torch
from torch import nn

from stretto.config import Config, load, to_toml
from stretto.errors import ConfigError, StrettoError
from stretto.optim import (
    LAMB,
    LARS,
    SGD,
    Adam,
    AdamW,
    LAMBConfig,
    LARSConfig,
    Momentum,
    OptimConfig,
    SGDConfig,
    TrustRatioOptions,
    derive_lr_schedule,
    make_optimizer,
)

KINDS = {"sgd": SGD, "lars": LARS, "lamb": LAMB, "adam": Adam, "adamw": AdamW}


class Run(Config):
    optim: OptimConfig = SGDConfig()


def table(*settings):
    return load(Run, None, [f"optim.{setting}" for setting in settings]).config.optim


def model_with_norm():
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.LayerNorm((2, 3, 3)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_builds_its_optimizer_with_the_default_groups(kind):
    model = model_with_norm()
    optimizer = make_optimizer(table(f"kind={kind}", "weight_decay=0.1"), model)(model.parameters())
    assert type(optimizer) is KINDS[kind]
    decayed, spared = optimizer.param_groups
    assert decayed["params"] == [model[0].weight]
    assert spared["params"] == [model[0].bias, model[1].weight, model[1].bias]
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert (decayed.get("adapt", True), spared["adapt"]) == (True, False)


@pytest.mark.parametrize("kind", KINDS)
def test_decay_all_leaves_one_group(kind):
    model = model_with_norm()
    config = table(f"kind={kind}", "weight_decay=0.1", "decay_all=true")
    (group,) = make_optimizer(config, model)(model.parameters()).param_groups
    assert (len(group["params"]), group["weight_decay"]) == (4, 0.1)
    assert group.get("adapt", True)


def test_a_subset_of_the_parameters_is_split_by_identity():
    model = model_with_norm()
    (group,) = make_optimizer(SGDConfig(), model)([model[1].weight]).param_groups
    assert group["weight_decay"] == 0


def test_settings_reach_the_optimizer():
    model = nn.Linear(2, 2)
    config = LARSConfig(
        trust=0.02, eps=1e-9, momentum=0.8, momentum_correction=True, ratio_decay="peak"
    )
    optimizer = make_optimizer(config, model, peak_lr=7.0)(model.parameters())
    group = optimizer.param_groups[0]
    options = {
        key: group[key] for key in ("lr", "trust", "eps", "momentum", "order", "ratio_decay")
    }
    assert options == {
        "lr": 7.0,
        "trust": 0.02,
        "eps": 1e-9,
        "momentum": 0.8,
        "order": "inside",
        "ratio_decay": "peak",
    }
    assert (optimizer.peak_lr, group["momentum_correction"]) == (7.0, True)
    limited = make_optimizer(LAMBConfig(norm_limit=10.0, beta1=0.5), model)(model.parameters())
    group = limited.param_groups[0]
    assert (group["norm_limit"], group["beta1"], group["eps"]) == (10.0, 0.5, 1e-6)


BAD = {
    "a key of another decay": (
        ["decay=cosine", "decay_power=3"],
        'optim: decay_power belongs to decay = "poly", and decay is "cosine": leave decay_power',
    ),
    "a key of two decays": (
        ["decay_floor=0.5"],
        'decay_floor belongs to decay = "cosine" or "poly", and decay is "constant"',
    ),
    "points without steps": (
        ["decay=poly", "decay_epochs=[3.0]"],
        'decay_epochs belongs to decay = "step"',
    ),
    "steps without points": (["decay=step"], "needs decay_epochs, such as [30, 60, 80]"),
    "points out of order": (
        ["decay=step", "decay_epochs=[30, 20]"],
        "decay_epochs = [30.0, 20.0]: expected growing numbers above 0",
    ),
    "a length of no warm-up": (
        ["warmup=none", "warmup_steps=3"],
        'warmup_steps belongs to warmup = "gradual" or "constant", and warmup is "none"',
    ),
    "two lengths": (["warmup_steps=3", "warmup_epochs=1"], "both set the length"),
    "a constant of no length": (["warmup=constant"], "needs warmup_steps or warmup_epochs"),
    "a start of no length": (["warmup_from=0.1"], "warmup_from needs warmup_steps or"),
    "a warm-up that would fall": (
        ["warmup_steps=3", "lr=0.1", "warmup_from=0.2"],
        "optim: warmup_from = 0.2 is above lr = 0.1, and a warm-up does not fall: lower",
    ),
    "one that would fall, and nothing is scaled": (
        ["warmup_steps=3", "warmup_from=0.2", "reference_batch=8", "scaling=none"],
        "warmup_from = 0.2 is above lr = 0.1",
    ),
    "a rule without a reference": (["scaling=sqrt"], "scaling needs reference_batch"),
    "a batch without a reference": (["for_batch=64"], "for_batch needs reference_batch"),
    "looking ahead along nothing": (
        ["momentum=0.0", "nesterov=true"],
        "optim: nesterov looks ahead along the momentum, which is 0",
    ),
    "a correction of what needs none": (
        ["momentum_correction=true"],
        'momentum_correction is only for momentum of the order "inside"; "outside" needs none',
    ),
    "a constant of another kind": (["trust=0.1"], "optim.trust = 0.1: unknown key"),
    "another word": (["decay=linear"], 'expected one of "constant", "cosine", "step", "poly"'),
}


@pytest.mark.parametrize(("settings", "message"), BAD.values(), ids=BAD)
def test_contradicting_settings_are_refused_with_the_keys_of_the_run_file(settings, message):
    with pytest.raises(ConfigError) as caught:
        table(*settings)
    assert message in str(caught.value)


def test_a_batch_far_below_the_reference_starts_at_its_peak():
    config = table("warmup_steps=3", "warmup_from=0.2", "reference_batch=256")
    derived = derive_lr_schedule(config, batch=64, epoch_steps=10, total_steps=90)
    assert [derived.rate_at(step) for step in range(4)] == [0.025] * 4


def test_a_table_written_out_with_all_its_defaults_is_read_back(tmp_path):
    path = tmp_path / "run.toml"
    for kind in KINDS:
        loaded = load(Run, None, [f"optim.kind={kind}", "optim.decay=poly"])
        path.write_text(to_toml(loaded))
        assert load(Run, path).config == loaded.config


def test_rate_keys_are_the_shared_keys_without_those_of_weight_decay():
    keys = SGDConfig.rate_keys()
    assert keys == LARSConfig.rate_keys()
    assert {"lr", "decay", "decay_length", "warmup_from", "for_batch"} <= keys
    assert not keys & {"kind", "momentum", "weight_decay", "decay_all"}


def test_a_decay_inside_the_warm_up_is_refused():
    config = SGDConfig(decay="step", decay_epochs=(2.0,), warmup_epochs=5)
    with pytest.raises(ConfigError, match="epoch 2, which is step 20, inside the warm-up of 50"):
        derive_lr_schedule(config, batch=1, epoch_steps=10, total_steps=100)


RECORDS = {
    "momentum too large": (lambda: Momentum(1.0), "below 1"),
    "order": (lambda: Momentum(order="both"), '"inside" or "outside"'),
    "peak without a rate": (lambda: TrustRatioOptions(ratio_decay="peak"), "needs peak_lr"),
    "decay of the ratio": (lambda: TrustRatioOptions(ratio_decay="none"), '"plain" or "peak"'),
    "rate": (lambda: SGD([torch.ones(1)], -1.0), "lr -1.0"),
    "decay": (lambda: SGD([torch.ones(1)], 1.0, weight_decay=-1.0), "weight_decay -1.0"),
}


@pytest.mark.parametrize(("build", "message"), RECORDS.values(), ids=RECORDS)
def test_optimizers_built_by_hand_check_their_numbers(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_sparse_and_complex_gradients_are_refused():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(StrettoError, match=r"shape \[5, 2\] is sparse.*sparse=False"):
        SGD(table.parameters(), 0.1).step()
    wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    wave.grad = torch.ones_like(wave)
    with pytest.raises(StrettoError, match=r"complex.*view_as_real"):
        LARS([wave], 0.1).step()


def test_a_closure_is_called_with_gradients_on():
    weight = nn.Parameter(torch.ones(2))

    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert SGD([weight], 0.1).step(closure).tolist() == 2.0
    assert weight.tolist() == pytest.approx([0.8, 0.8])


def test_a_group_added_later_is_stepped_with_its_own_options():
    first, later = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = SGD([first], 0.1)
    optimizer.add_param_group({"params": [later], "lr": 0.5})
    first.grad, later.grad = torch.ones(1), torch.ones(1)
    optimizer.step()
    assert [float(p.detach()) for p in (first, later)] == pytest.approx([0.9, 0.5])


def rules_of(config, batch=8192, epoch_steps=100):
    derived = derive_lr_schedule(
        config, batch=batch, epoch_steps=epoch_steps, total_steps=90 * epoch_steps
    )
    return {line.name: (line.value, line.rule) for line in derived.lines()}


def test_derived_values_are_explained_with_their_rules():
    config = SGDConfig(
        lr=0.1,
        reference_batch=256,
        weight_decay=1e-4,
        nesterov=True,
        warmup_epochs=5,
        warmup_from=0.1,
        decay="step",
        decay_epochs=(30.0, 60.0, 80.0),
    )
    lines = rules_of(config)
    assert lines["lr"] == ("3.2", "0.1 x 8192 / 256, linear scaling")
    assert lines["warm-up"][0] == "500 steps (5 epochs)"
    assert lines["warm-up"][1].startswith("gradual, 0.1 to 3.2")
    assert lines["decay"] == ("x 0.1 at epochs 30, 60, 80", "from steps 3000, 6000, 8000 on")
    assert "not on biases and norms" in lines["weight decay"][1]
    assert lines["momentum"][0] == "0.9, Nesterov"


def test_the_constants_of_lars_are_explained():
    config = LARSConfig(
        lr=13.0,
        reference_batch=8192,
        scaling="sqrt",
        weight_decay=5e-5,
        trust=0.0025,
        eps=1e-9,
        ratio_decay="peak",
        warmup_steps=10,
        decay="poly",
        decay_power=2.2,
        decay_length=52,
        decay_floor=0.0025,
        for_batch=8192,
        decay_all=True,
    )
    lines = rules_of(config, batch=1)
    rule = "13 x sqrt(8192 / 8192), square-root scaling (optim.for_batch)"
    assert lines["lr"] == ("13", rule)
    assert lines["decay"][0] == "power 2.2 over 5200 steps (52 epochs)"
    assert lines["floor"] == ("0.0325", "0.0025 x 13, the rate of every step from 5210 on")
    assert lines["ratio"][0] == "0.0025 |w| / (|g| + 0.00065 |w| + 1e-09)"
    assert "on every parameter" in lines["weight decay"][1]


CURVE = {"decay": "poly", "warmup_steps": 20}
STEPS = {"decay": "step", "decay_epochs": (3.0, 6.0), "warmup_steps": 20}
LENGTHS = {
    "whole": (CURVE, 90, "reached as the run ends, after 90 steps", None),
    "longer": (CURVE | {"decay_length": 4}, 90, "the rate of every step from 60 on", None),
    "in the decay": (
        CURVE | {"decay_length": 8, "decay_floor": 0.5},
        90,
        "0.5 x 0.1, not reached",
        "the run ends in the decay, 10 steps before its end, at a rate of 0.0509453",
    ),
    "in the warm-up": (
        CURVE | {"decay_length": 8},
        3,
        "not reached",
        "the run ends in the warm-up of 20 steps, at a rate of 0.015",
    ),
    "as decay should begin": (
        CURVE,
        20,
        None,
        "the run ends in the warm-up of 20 steps, at a rate of 0.1",
    ),
    "before a point": (
        STEPS,
        60,
        None,
        "the run ends before the decay from step 60 on, at a rate of 0.01",
    ),
    "after all points": (STEPS, 61, None, None),
    "with a rate that stays": ({"warmup_steps": 20}, 20, None, None),
    "with a rate that grows": (
        {"warmup_steps": 20},
        19,
        None,
        "the run ends in the warm-up of 20 steps, at a rate of 0.095",
    ),
}


@pytest.mark.parametrize(("keys", "total", "floor", "length"), LENGTHS.values(), ids=LENGTHS)
def test_a_run_that_ends_before_its_schedule_says_so(keys, total, floor, length):
    derived = derive_lr_schedule(SGDConfig(**keys), batch=1, epoch_steps=10, total_steps=total)
    rules = {line.name: line.rule for line in derived.lines()}
    assert (rules.get("floor"), rules.get("length")) == (floor, length)


def test_a_decay_that_never_begins_is_reported_as_such():
    derived = derive_lr_schedule(SGDConfig(**CURVE), batch=1, epoch_steps=10, total_steps=3)
    rules = {line.name: (line.value, line.rule) for line in derived.lines()}
    assert rules["decay"] == ("power 2", "never begins: the run ends first")


def test_other_settings_are_explained_too():
    assert rules_of(table("kind=adamw"))["betas"] == ("0.9, 0.999", "eps 1e-08")
    assert "up to 10" in rules_of(LAMBConfig(norm_limit=10.0))["ratio"][1]
    assert rules_of(SGDConfig(momentum=0))["momentum"] == ("0", "none")
    unscaled = SGDConfig(reference_batch=256, scaling="none", warmup="constant", warmup_steps=3)
    assert rules_of(unscaled)["lr"][1] == "as set for 256 samples, not scaled"
    assert rules_of(unscaled)["warm-up"][1] == "constant at 0.1"
    assert rules_of(SGDConfig())["warm-up"][0] == rules_of(SGDConfig())["decay"][0] == "none"
