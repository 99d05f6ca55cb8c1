"""``stretto profile`` on one rank: estimates, descriptions, and every mistake one message."""

import numpy as np
import pytest
import torch

from stretto.cli.main import main
from stretto.data import open_sample_source
from stretto.models import build_model
from stretto.planner.model_units import called_modules
from stretto.planner.profile import read_profile
from stretto.planner.timing import time_plan
from stretto.recipes import load_run
from stretto.strategies.sharded.config import ShardedConfig, checked_plan

RUN = """
[run]
threads = 1
[data]
samples = 64
test_samples = 8
size = 16
[model]
width = 8
[train]
batch = 16
[optim]
kind = "adam"
lr = 0.01
[strategy]
kind = "sharded"
unit = "1KB"
"""
BOX = ["--cluster", "box 400mbit"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def test_a_described_link_needs_one_rank_only(here, capsys):
    assert main(["profile", "run.toml", *BOX, "--repeats", "2", "--out", "p.json"]) == 0
    out = capsys.readouterr().out
    found = read_profile(here / "p.json")
    assert found.link.ranks == 4
    assert (found.parameter_bytes, found.gradient_bytes, found.kept_bytes) == (4, 4, 4)
    assert (found.state_bytes, found.slowdown, found.unit_bytes) == (8, 1.0, 1000)
    assert found.compute_s > 0
    assert found.update_s > 0
    assert all(unit.name in out for unit in found.units)
    assert "link of 4 ranks" in out


def test_widths_and_units_are_those_of_the_run(here):
    arguments = ["strategy.parameters=bf16", "strategy.wire=fp32", "optim.kind=sgd"]
    sgd = ["optim.momentum=0.9", *(unit := ["strategy.unit=800"])]
    assert (
        main(["profile", "run.toml", *arguments, *sgd, *BOX, "--estimate", "--out", "p.json"]) == 0
    )
    found = read_profile(here / "p.json")
    widths = (found.parameter_bytes, found.gradient_bytes, found.kept_bytes, found.state_bytes)
    assert widths == (2, 4, 4, 4)
    assert main(["profile", "run.toml", *unit, *BOX, "--estimate", "--out", "own.json"]) == 0
    own = read_profile(here / "own.json")
    assert [unit.name for unit in found.units] == [unit.name for unit in own.units]


def test_a_plan_of_the_run_fits_its_profile(here):
    assert main(["profile", "run.toml", *BOX, "--estimate"]) == 0
    found = read_profile(here / "profile.json")
    config = load_run(here / "run.toml").config
    model = build_model(config.model, 0)
    inputs, _ = open_sample_source(config.data, train=True).batch(np.arange(2))
    calls = called_modules(model, lambda: model(inputs))
    strategy = ShardedConfig(unit=1000)
    assert time_plan(checked_plan(strategy, model, calls), found).step_s > 0


def test_shares_are_those_of_the_described_ranks(here):
    kept = []
    for mesh in ("2x1", "8x1"):
        (here / "cluster.toml").write_text(
            f'ranks_per_host = "{mesh}"\n[between]\nlatency_s = 0\nbytes_per_s = 1e9\n'
            "[inside]\nlatency_s = 0\nbytes_per_s = 1e9\n"
        )
        assert main(["profile", "run.toml", "--cluster", "cluster.toml", "--estimate"]) == 0
        found = read_profile(here / "profile.json")
        kept.append(sum(unit.activation_bytes for unit in found.units))
    assert kept[0] == pytest.approx(4 * kept[1], rel=0.02)


OWN = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(768, 64).requires_grad_(False)
        self.shared = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros(1000))

    def forward(self, x):
        x = self.shared(self.shared(self.frozen(x.flatten(1))).relu())
        x = x * self.norm.weight + self.norm.bias
        return self.head(x)

class Routes(Own):
    def forward(self, x):
        return super().forward(x) * (1.0 if x.mean().item() > 0 else 2.0)
"""


def own(here, name="Own"):
    (here / "nobodys.py").write_text(OWN)
    text = f'[model]\nkind = "custom"\ntarget = "nobodys:{name}"\n'
    (here / "own.toml").write_text(RUN.replace("[model]\nwidth = 8\n", text))


@pytest.mark.parametrize("how", [[], ["--estimate"]])
def test_a_model_that_nobody_prepared(how, here):
    own(here)
    assert main(["profile", "own.toml", *BOX, "--repeats", "1", *how]) == 0
    found = read_profile(here / "profile.json")
    numel = 64 * 64 + 64 + 128 + 640 + 10
    assert sum(unit.numel for unit in found.units) == numel
    assert any(unit.used_often for unit in found.units)
    assert found.other_bytes >= 4 * (768 * 64 + 64 + 1000)


def test_a_model_that_looks_at_numbers_is_to_be_measured(here, capsys):
    own(here, "Routes")
    assert main(["profile", "own.toml", *BOX, "--estimate"]) == 2
    message = capsys.readouterr().err
    assert "measure it" in message
    assert len(message.splitlines()) == 1
    assert main(["profile", "own.toml", *BOX, "--repeats", "1"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run.toml"], "stretto lab"),
        (["run.toml", "--estimate"], "--cluster"),
        (["run.toml", *BOX, "--device", "tpu"], "cpu (Gloo) or cuda"),
        (["run.toml", *BOX, "--estimate", "--device", "tpu"], "h200"),
        (["run.toml", *BOX, "--repeats", "0"], "--repeats 0"),
        (["run.toml", *BOX, "--device", "cuda"], "no GPU"),
        (["run.toml", "--cluster", "box 40mbit"], "box 400mbit"),
        (["run.toml", "--cluster", "none.toml"], "none.toml"),
        (["run.toml", *BOX, "--out", "no/folder.json"], "no folder"),
        (["run.toml", *BOX, "train.bacth=8"], "batch"),
        (["none.toml", *BOX], "none.toml"),
        (["run.toml", *BOX, "model.classes=2"], "cannot learn"),
    ],
)
def test_a_mistake_gets_one_clear_message(arguments, said, here, capsys):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["profile", *arguments]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message
    assert len(message.splitlines()) <= 2
    assert not (here / "profile.json").exists()
