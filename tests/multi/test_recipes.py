"""Every recipe runs: 4 workers, 2 images each, 3 steps, with the rates of the full batch."""

import json
import math
from pathlib import Path

import pytest
import torch

from stretto.models import build_model
from stretto.recipes import RECIPES, find_recipe, load_run
from tests.imagenet import write_imagenet
from tests.multi.small_run import stretto

pytestmark = [pytest.mark.multi, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    return write_imagenet(tmp_path_factory.mktemp("imagenet"))


@pytest.fixture(scope="module")
def ten_classes(tmp_path_factory):
    return write_imagenet(tmp_path_factory.mktemp("ten"), classes=10, per_class=8)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_s_model_accepts_images_of_the_published_size(name):
    config = load_run(Path(name)).config
    size = config.data.size
    model = build_model(config.model, seed=0).to("meta")
    logits = model(torch.empty(2, 3, size, size, device="meta"))
    assert logits.shape == (2, config.model.classes)


AT_FULL_SIZE = ("resnet50_1hour", "alexnet_4min")
"""One recipe of each model; the others compute the same layers on smaller images."""


def smaller_images(name, tables):
    """Return settings for images of 64 pixels at most, except for one recipe of each model."""
    return [] if name in AT_FULL_SIZE or tables["data"].get("size", 224) <= 64 else ["data.size=64"]


ONLY_OTHER_GROUPS = ("crossover_86k_groups8", "crossover_86k_groups16")
"""They differ from a tested recipe only in a number that four workers cannot have."""


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ONLY_OTHER_GROUPS])
def test_a_recipe_trains(name, imagenet, ten_classes, tmp_path):
    recipe = find_recipe(name)
    data = ten_classes if name == "cifar10" else imagenet
    batch = recipe.tables["train"]["batch"]
    settings = [f"data.path={data}", "train.batch=8", f"optim.for_batch={batch}", "train.steps=3"]
    settings += ["train.log_every=1", "run.threads=1", "data.decoders=1"]
    settings += smaller_images(name, recipe.tables)
    # CPUs compute fp16 eight times as slowly as fp32: here, small models try it (test_guard.py).
    settings += ["train.precision=fp32"]
    done = stretto(tmp_path, "train", name, "--workers", "4", *settings, limit_s=200)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "runs" / name / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    steps = [event for event in events if event["event"] == "step_done"]
    assert len(steps) == 3
    assert all(math.isfinite(event["loss"]) for event in steps)
    (ended,) = (event for event in events if event["event"] == "run_ended")
    scaling = ended["scaling"]
    made = scaling["one_worker"] * scaling["workers"] * scaling["efficiency"]
    assert made == pytest.approx(ended["samples_per_s"], rel=1e-6)
