"""Old names still work, with a warning; a name and its successor together are refused."""

import json
from pathlib import Path

import pytest

import stretto
from stretto.config import load
from stretto.errors import ConfigError
from stretto.planner.plan import MessageKind
from stretto.planner.profile import read_profile
from stretto.renamed import SETTINGS, RenamedWarning, with_new_settings, with_old_keys
from stretto.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]
OLD = {
    "strategy.fusion": '"2KB"',
    "strategy.cuts": "[1, 2]",
    "run.silence_s": "7.5",
    "data.bad_limit": "0.25",
    "init.fresh": '["head.*"]',
    "strategy.pending": "2",
}
KIND = {
    "data.bad_limit": 'kind = "images"\npath = "x"\n',
    "init.fresh": 'checkpoint = "x"\n',
    "strategy.pending": 'kind = "sharded"\n',
}


def value_of(config, key):
    table, name = key.split(".")
    return getattr(getattr(config, table), name, None)


def test_every_renamed_setting_is_tried_here():
    assert OLD.keys() == SETTINGS.keys()


@pytest.mark.parametrize("old", SETTINGS)
def test_a_run_file_with_an_old_name_means_the_new_one(old, tmp_path):
    table, name = old.split(".")
    run_file, new_file = tmp_path / "run.toml", tmp_path / "new.toml"
    run_file.write_text(f"[{table}]\n{KIND.get(old, '')}{name} = {OLD[old]}\n")
    new_name = SETTINGS[old].split(".")[1]
    new_file.write_text(f"[{table}]\n{KIND.get(old, '')}{new_name} = {OLD[old]}\n")
    with pytest.warns(RenamedWarning, match=f"{old} is now called {SETTINGS[old]}"):
        found = load(RunConfig, run_file)
    assert found.config == load(RunConfig, new_file).config
    assert value_of(found.config, SETTINGS[old]) != value_of(RunConfig(), SETTINGS[old])


def test_an_override_with_an_old_name_means_the_new_one():
    with pytest.warns(RenamedWarning, match=r"override: strategy\.fusion"):
        found = load(RunConfig, None, ["strategy.fusion=4KB"]).config
    assert found.strategy.bucket_bytes == 4000


def test_both_names_together_are_refused(tmp_path):
    run_file = tmp_path / "run.toml"
    run_file.write_text("[run]\nsilence_s = 3.0\nheartbeat_timeout_s = 4.0\n")
    with pytest.raises(ConfigError, match=r"run\.silence_s and run\.heartbeat_timeout_s are both"):
        load(RunConfig, run_file)


def test_a_stored_study_is_compared_under_new_names():
    assert with_new_settings({"run.silence_s": 1, "run.seed": 2}) == {
        "run.heartbeat_timeout_s": 1,
        "run.seed": 2,
    }


def test_plan_files_with_the_old_words_of_messages_are_read():
    assert MessageKind("gather") is MessageKind.UNSHARD
    assert MessageKind("regather") is MessageKind.UNSHARD_FOR_BACKWARD
    with pytest.raises(ValueError, match="scatter"):
        MessageKind("scatter")


def test_a_profile_with_old_keys_is_read(tmp_path):
    table = json.loads((ROOT / "benchmarks" / "profiles" / "vgg16_10.json").read_text())
    values = {"parting": 1.1, "straying": 1.2, "straying_met": 1.3, "holes": 0.25}
    assert {"parting", "holes"} <= table.keys()
    (tmp_path / "old.json").write_text(json.dumps({**table, **values}))
    found = read_profile(tmp_path / "old.json")
    assert (found.no_barrier_slowdown, found.allocator_overhead) == (1.1, 0.25)
    assert found.reordering_slowdown == 1.2
    assert found.reordering_slowdown_with_barrier == 1.3


def test_json_records_have_old_keys_beside_the_new_ones():
    assert with_old_keys({"name": "a", "memory_limit": 8, "predicted_s": 0.5}) == {
        "name": "a",
        "memory_limit": 8,
        "budget": 8,
        "predicted_s": 0.5,
        "told_s": 0.5,
    }


def test_stretto_settle_is_stretto_consolidate():
    with pytest.warns(RenamedWarning, match=r"stretto\.settle is now called stretto\.consolidate"):
        function = stretto.settle
    assert function is stretto.consolidate
