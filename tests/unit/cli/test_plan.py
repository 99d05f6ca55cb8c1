"""``stretto plan`` on one machine: a file for a run, words, JSON, a page; mistakes in one line."""

import json

import pytest

from stretto.bench.profile_run import write_profile
from stretto.cli.main import main
from stretto.planner.check import check
from stretto.planner.memory import Footprints
from stretto.planner.plan import read_plan
from stretto.planner.profile import Link, Profile, UnitCost, read_profile
from stretto.planner.timing import time_plan

pytestmark = pytest.mark.usefixtures("kept_solvers")

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
steps = 2
[optim]
kind = "adam"
lr = 0.01
[strategy]
kind = "sharded"
"""
BOX = ["--cluster", "box 400mbit"]
UNIT = {"forward_s": 2e-3, "backward_s": 4e-3, "activation_bytes": 400_000}
PROFILE = Profile(
    units=tuple(UnitCost(name=f"blocks.{i}", numel=250_000, **UNIT) for i in range(4)),
    link=Link(ranks=4, latency_s=1e-4, bytes_per_s=2e8),
    state_bytes=8,
    source="made up",
    unit_bytes=1000,
)
MADE_UP = ["--profile", "made-up.json"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    write_profile(PROFILE, tmp_path / "made-up.json")
    return tmp_path


def test_a_person_is_told_every_unit_the_time_and_what_memory_is_worth(here, capsys):
    assert main(["plan", "run.toml", *MADE_UP, "--memory", "8MB", "--what-if", "rate=10gbit"]) == 0
    output = capsys.readouterr()
    assert all(f"blocks.{index} " in output.out for index in range(4))
    assert "a step takes" in output.out
    assert "of 8 MB" in output.out
    assert "memory is short in" in output.out
    assert "profile: made up" in output.out
    assert "if rate=10gbit: " in output.out
    assert output.err == "stretto plan: wrote plan.json\n"
    plan = read_plan(here / "plan.json")
    check(plan)
    assert Footprints(PROFILE).peak(plan) <= 8_000_000
    assert plan.unit_bytes == PROFILE.unit_bytes, "who runs it joins as many"


def test_an_object_says_the_same_to_programs(here, capsys):
    arguments = ["--memory", "9MB", "--what-if", "memory=8MB", "--pareto", "2", "--json"]
    assert main(["plan", "run.toml", *MADE_UP, *arguments, "--out", "p.json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    plan = read_plan(here / "p.json")
    assert found["step_s"] == pytest.approx(time_plan(plan, PROFILE).step_s)
    assert found["peak_bytes"] == Footprints(PROFILE).peak(plan)
    assert found["bound_s"] <= found["step_s"] <= found["greedy_s"]
    assert found["memory_limit"] == found["budget"] == 9_000_000
    assert [unit["unit"] for unit in found["units"]] == [unit.name for unit in plan.units]
    assert len(found["what_if"]) == 1
    (less, slower), (more, faster) = found["pareto"]
    assert less < more
    assert slower >= faster


def test_a_page_is_written_beside_the_plan(here, capsys):
    arguments = ["--memory", "9MB", "--page", "plan.html"]
    assert main(["plan", "run.toml", *MADE_UP, *arguments]) == 0
    assert "wrote plan.json and plan.html" in capsys.readouterr().err
    page = (here / "plan.html").read_text()
    assert "A plan for run.toml" in page
    assert "blocks.3" in page


def test_without_a_profile_the_model_is_estimated(here, capsys):
    assert main(["plan", "run.toml", *BOX, "--memory", "10MB", "strategy.unit=1KB"]) == 0
    assert "profile: estimated at the rates of cpu, link of box 400mbit" in capsys.readouterr().out
    plan = read_plan(here / "plan.json")
    assert plan.unit_bytes == 1000
    assert len(plan.units) > 1


def test_without_a_word_on_units_they_are_joined_as_far_as_the_link_is_worth_it(here):
    (here / "cluster.toml").write_text(
        'ranks_per_host = "2x1"\n[between]\nlatency_s = 1e-3\nbytes_per_s = 1e9\n'
        "[inside]\nlatency_s = 0\nbytes_per_s = 1e9\n"
    )
    assert main(["profile", "run.toml", "--cluster", "cluster.toml", "--estimate"]) == 0
    found = read_profile(here / "profile.json")
    # A message of so many bytes is nine tenths bytes and one tenth latency.
    latency_s, sent_s = found.link.latency_s, found.unit_bytes / found.link.bytes_per_s
    assert sent_s / (latency_s + sent_s) == pytest.approx(0.9)
    assert found.unit_bytes > 2_000_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--profile FILE"),
        ([*BOX, "--device", "tpu"], "h200"),
        (["--cluster", "box 40mbit"], "box 400mbit"),
        (["--profile", "none.json"], "none.json"),
        (["--profile", "run.toml"], "run.toml"),
        ([*MADE_UP, "--what-if", "memroy=8GiB"], 'did you mean "memory"'),
        ([*MADE_UP, "--what-if", "latency=soon"], '"50us" or "1ms"'),
        ([*MADE_UP, "--what-if", "rate=0gbit"], "nothing could be sent"),
        ([*MADE_UP, "--out", "no/plan.json"], "no folder"),
        ([*MADE_UP, "--page", "no/plan.html"], "no folder"),
        ([*MADE_UP, "--memory", "lots"], "lots"),
        ([*MADE_UP, "train.bacth=8"], "batch"),
        ([*MADE_UP, "--memory", "1MB"], "no plan fits into 1 MB: the smallest needs 6."),
    ],
)
def test_a_mistake_gets_one_clear_message(arguments, said, here, capsys):
    memory = [] if "--memory" in arguments else ["--memory", "9MB"]
    assert main(["plan", "run.toml", *arguments, *memory]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message
    assert len(message.splitlines()) <= 2
    assert not list(here.glob("plan*"))


OWN = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(3, 16, 4, 4)
        self.place = nn.Parameter(torch.zeros(1, 16, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.norm = nn.LayerNorm(16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.cut(x).flatten(2).transpose(1, 2) + self.place
        x = self.encoder(x).mean(1) * self.norm.weight + self.norm.bias
        return self.head(self.frozen(x))
"""


def test_a_model_that_nobody_prepared_is_profiled_planned_and_trained(here, capfd):
    (here / "nobodys_plan.py").write_text(OWN)
    text = '[model]\nkind = "custom"\ntarget = "nobodys_plan:Own"\n'
    (here / "own.toml").write_text(RUN.replace("[model]\nwidth = 8\n", text))
    unit = "strategy.unit=1KB"
    assert main(["profile", "own.toml", unit, *BOX, "--estimate"]) == 0
    arguments = ["--profile", "profile.json", "--memory", "10MB"]
    assert main(["plan", "own.toml", *arguments]) == 0
    assert main(["train", "own.toml", "strategy.plan=plan.json", "run.name=by-plan"]) == 0
    memory = ["strategy.memory=10MB", "strategy.profile=profile.json"]
    assert main(["train", "own.toml", *memory, "run.name=by-profile"]) == 0
    memory = ["strategy.memory=10MB", "strategy.cluster=box 400mbit"]
    assert main(["train", "own.toml", *memory, unit, "run.name=by-estimate"]) == 0
    names = [unit.name for unit in read_profile(here / "profile.json").units]
    for name in ("by-plan", "by-profile", "by-estimate"):
        kept = read_plan(here / "runs" / name / "plan.json")
        assert [unit.name for unit in kept.units] == names
    assert len(names) > 3
    assert capfd.readouterr().err.count("ended after 2 steps") == 3
