"""``stretto profile``, ``stretto plan``, ``stretto train`` and ``stretto bench plans`` together."""

import json

import pytest

from stretto.cli.main import main
from stretto.planner.memory import Footprints
from stretto.planner.plan import read_plan
from stretto.planner.profile import read_profile
from tests.multi.small_run import RUN, last_tensors, same, stretto
from tests.multi.two_ranks import on_two_ranks

pytestmark = [pytest.mark.multi, pytest.mark.timeout(200), pytest.mark.usefixtures("kept_solvers")]

SHARDED = RUN.replace(
    'bucket_bytes = "2KB"\nalgorithm = "native, ring from 1KB"', 'kind = "sharded"'
)
MEMORY = "5MB"
LIMIT = "memory_limit"
"""The key of the memory limit in the records of ``stretto bench plans``."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a profile that two ranks measured, and a plan made from it."""
    made = tmp_path_factory.mktemp("planned")
    (made / "run.toml").write_text(SHARDED)
    done = on_two_ranks(made, ["profile", "run.toml", "strategy.unit=1KB", "--repeats", "1"])
    assert done.returncode == 0, done.stderr
    assert _plan(made) == 0
    return made


def _plan(folder):
    where = ["--profile", str(folder / "profile.json"), "--out", str(folder / "plan.json")]
    return main(["plan", str(folder / "run.toml"), *where, "--memory", MEMORY])


def trained(folder, name, *arguments):
    """Train on two ranks; return the plan that the run kept."""
    return read_plan(_trained(folder, name, *arguments)[0])


def _trained(folder, name, *arguments):
    """Train on two ranks; return the file of the plan that the run kept, and what was output."""
    done = on_two_ranks(folder, ["train", "run.toml", f"run.name={name}", *arguments])
    assert done.returncode == 0, done.stderr
    return folder / "runs" / name / "plan.json", done.stderr


def test_a_run_uses_the_plan_that_was_made_from_a_profile(folder):
    made = read_plan(folder / "plan.json")
    assert made.unit_bytes == 1000
    assert len(made.units) > 2
    assert trained(folder, "by-plan", "strategy.plan=plan.json") == made


def test_a_run_makes_its_plan_from_a_profile(folder):
    arguments = [f"strategy.memory={MEMORY}", "strategy.profile=profile.json"]
    path, output = _trained(folder, "by-profile", *arguments)
    assert output.count("profile.json says: a step takes ") == 1, "once, by rank 0"
    kept = read_plan(path)
    profile = read_profile(folder / "profile.json")
    assert [unit.name for unit in kept.units] == [unit.name for unit in profile.units]
    assert Footprints(profile).peak(kept) <= 5_000_000


def test_a_run_makes_its_plan_from_an_estimate_and_the_plan_file_repeats_the_run(folder):
    arguments = [f"strategy.memory={MEMORY}", "strategy.cluster=box 400mbit", "strategy.unit=1KB"]
    kept = trained(folder, "by-estimate", *arguments)
    assert len(kept.units) > 2
    path = "strategy.plan=runs/by-estimate/plan.json"
    assert trained(folder, "again", path) == kept
    assert same(last_tensors(folder, "by-estimate"), last_tensors(folder, "again"))


@pytest.mark.parametrize(
    "source", ["strategy.profile=profile.json", "strategy.cluster=box 400mbit"]
)
def test_too_little_memory_ends_the_run_with_the_minimum(source, folder):
    arguments = ["--workers", "2", "run.name=little", "strategy.memory=20KB", source]
    done = stretto(folder, "train", "run.toml", *arguments)
    assert done.returncode == 2
    first, *rest = done.stderr.splitlines()
    assert first.startswith("stretto: no plan fits into 20 KB: the smallest needs ")
    assert "Traceback" not in done.stderr
    assert all("failed" in line for line in rest), "the launcher names the rank, and no more"
    assert not (folder / "runs" / "little" / "plan.json").exists()


def benched(folder, *arguments):
    """Time plans of the profile on two ranks; return the row of each by name."""
    done = on_two_ranks(
        folder, ["bench", "plans", "profile.json", "--run", "run.toml", "--runs", "1", *arguments]
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["name"]: row for row in rows}


def test_plans_are_timed_beside_presets_and_fsdp2_at_the_memory_of_presets(folder):
    seen = benched(folder, "--json")
    assert {"ddp", "zero2, 1 ahead", "zero3, 2 ahead", "dear"} <= set(seen)
    assert any(name.startswith("fsdp2") for name in seen)
    limits = [seen[f"planned, {level}"][LIMIT] for level in ("low", "middle", "high")]
    assert limits[0] == seen["zero3, 1 ahead"]["predicted_bytes"]
    assert limits[2] == seen["zero2, 1 ahead"]["predicted_bytes"]
    assert limits[1] == (limits[0] + limits[2]) // 2
    for row in seen.values():
        assert row["step_s"] > 0
        if row[LIMIT] is not None:
            assert row["predicted_bytes"] <= row[LIMIT]


def test_memory_split_by_hand_is_timed_beside_its_plan_only(folder):
    seen = benched(folder, "--shares", "3", "--json")
    splits = [row for name, row in seen.items() if name.startswith("split")]
    assert set(seen) == {"no communication", "planned, middle", *(row["name"] for row in splits)}
    assert 1 <= len(splits) <= 3
    for row in splits:
        assert row["predicted_bytes"] <= row[LIMIT] == seen["planned, middle"][LIMIT]
        assert row["predicted_s"] >= seen["planned, middle"]["predicted_s"] * (1 - 1e-9)


def test_a_profile_of_other_ranks_and_fewer_than_no_shares_are_refused(folder):
    profile = read_profile(folder / "profile.json")
    link = profile.link.model_copy(update={"ranks": 3})
    (folder / "three.json").write_text(profile.model_copy(update={"link": link}).model_dump_json())
    for arguments, output in (
        (["three.json"], "three.json is a profile of 3 ranks, here are 2: make it anew on these"),
        (["profile.json", "--shares", "-1"], "--shares -1: expected how many, or 0 for none"),
    ):
        done = on_two_ranks(folder, ["bench", "plans", *arguments, "--run", "run.toml"])
        assert done.returncode != 0
        assert f"stretto: {output}\n" in done.stderr
