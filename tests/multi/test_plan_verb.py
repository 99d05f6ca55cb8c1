"""From a profile of two real ranks to a plan, and from there to training, in every way there is."""

import json
import subprocess
import sys

import pytest

from stretto.cli.main import main
from stretto.plan.footprint import Footprints
from stretto.plan.profile import read_profile
from stretto.plan.value import read_plan
from tests.multi.small_run import RUN, last_tensors, same, stretto

pytestmark = [pytest.mark.multi, pytest.mark.timeout(200)]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--"]
SHARDED = RUN.replace('fusion = "2KB"\nalgorithm = "native, ring from 1KB"', 'kind = "sharded"')
MEMORY = "5MB"


def on_two(folder, *words):
    """Run a verb on two ranks; return how it ended."""
    return subprocess.run(
        [*TORCHRUN, "stretto", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a profile that two ranks measured, and a plan made of it."""
    made = tmp_path_factory.mktemp("planned")
    (made / "run.toml").write_text(SHARDED)
    done = on_two(made, "profile", "run.toml", "strategy.unit=1KB", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    assert _plan(made) == 0
    return made


def _plan(folder):
    where = ["--profile", str(folder / "profile.json"), "--out", str(folder / "plan.json")]
    return main(["plan", str(folder / "run.toml"), *where, "--memory", MEMORY])


def trained(folder, name, *words):
    """Train on two ranks; return the plan that the run kept."""
    return read_plan(_trained(folder, name, *words)[0])


def _trained(folder, name, *words):
    """Train on two ranks; return the file of the plan that the run kept, and what was said."""
    done = on_two(folder, "train", "run.toml", f"run.name={name}", *words)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / name / "plan.json", done.stderr


def test_a_plan_that_was_made_of_a_profile_is_the_one_that_is_run(folder):
    made = read_plan(folder / "plan.json")
    assert made.unit_bytes == 1000
    assert len(made.units) > 2
    assert trained(folder, "by-plan", "strategy.plan=plan.json") == made


def test_a_plan_is_made_of_a_profile_when_the_run_starts(folder):
    words = [f"strategy.memory={MEMORY}", "strategy.profile=profile.json"]
    path, said = _trained(folder, "by-profile", *words)
    assert said.count("profile.json says: a step takes ") == 1, "once, by rank 0"
    kept = read_plan(path)
    profile = read_profile(folder / "profile.json")
    assert [unit.name for unit in kept.units] == [unit.name for unit in profile.units]
    assert Footprints(profile).peak(kept) <= 5_000_000


def test_a_plan_is_made_of_an_estimate_when_the_run_starts_and_its_file_repeats_the_run(folder):
    words = [f"strategy.memory={MEMORY}", "strategy.cluster=box 400mbit", "strategy.unit=1KB"]
    kept = trained(folder, "by-estimate", *words)
    assert len(kept.units) > 2
    path = "strategy.plan=runs/by-estimate/plan.json"
    assert trained(folder, "again", path) == kept
    assert same(last_tensors(folder, "by-estimate"), last_tensors(folder, "again"))


@pytest.mark.parametrize("known", ["strategy.profile=profile.json", "strategy.cluster=box 400mbit"])
def test_too_little_memory_ends_the_run_with_the_least_that_would_do(known, folder):
    words = ["--workers", "2", "run.name=little", "strategy.memory=20KB", known]
    done = stretto(folder, "train", "run.toml", *words)
    assert done.returncode == 2
    first, *rest = done.stderr.splitlines()
    assert first.startswith("stretto: no plan fits into 20 KB: the smallest needs ")
    assert "Traceback" not in done.stderr
    assert all("failed" in line for line in rest), "the launcher names the rank, and no more"
    assert not (folder / "runs" / "little" / "plan.json").exists()


def benched(folder, *words):
    """Time plans of the profile on two ranks; return what was seen of each, by name."""
    done = on_two(
        folder, "bench", "plans", "profile.json", "--run", "run.toml", "--runs", "1", *words
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["name"]: row for row in rows}


def test_plans_are_timed_beside_presets_and_fsdp2_within_the_budgets_of_presets(folder):
    seen = benched(folder, "--json")
    assert {"ddp", "zero2, 1 ahead", "zero3, 2 ahead", "dear"} <= set(seen)
    assert any(name.startswith("fsdp2") for name in seen)
    budgets = [seen[f"planned, {word}"]["budget"] for word in ("low", "middle", "high")]
    assert budgets[0] == seen["zero3, 1 ahead"]["told_bytes"]
    assert budgets[2] == seen["zero2, 1 ahead"]["told_bytes"]
    assert budgets[1] == (budgets[0] + budgets[2]) // 2
    for row in seen.values():
        assert row["step_s"] > 0
        if row["budget"] is not None:
            assert row["told_bytes"] <= row["budget"]


def test_a_budget_that_is_split_by_hand_is_timed_beside_its_plan_and_nobody_else(folder):
    seen = benched(folder, "--shares", "3", "--json")
    splits = [row for name, row in seen.items() if name.startswith("split")]
    assert set(seen) == {"no communication", "planned, middle", *(row["name"] for row in splits)}
    assert 1 <= len(splits) <= 3
    for row in splits:
        assert row["told_bytes"] <= row["budget"] == seen["planned, middle"]["budget"]
        assert row["told_s"] >= seen["planned, middle"]["told_s"] * (1 - 1e-9)


def test_a_profile_of_other_ranks_and_fewer_than_no_shares_are_refused(folder):
    profile = read_profile(folder / "profile.json")
    link = profile.link.model_copy(update={"ranks": 3})
    (folder / "three.json").write_text(profile.model_copy(update={"link": link}).model_dump_json())
    for words, said in (
        (["three.json"], "three.json is a profile of 3 ranks, here are 2: make it anew on these"),
        (["profile.json", "--shares", "-1"], "--shares -1: expected how many, or 0 for none"),
    ):
        done = on_two(folder, "bench", "plans", *words, "--run", "run.toml")
        assert done.returncode != 0
        assert f"stretto: {said}\n" in done.stderr, "torchrun adds words of its own"
