"""A key that a sharded run would ignore is refused, with the reason."""

import pytest

from stretto.config import load
from stretto.errors import ConfigError
from stretto.run import RunConfig

BESIDE_A_FILE = ["strategy.kind=sharded", "strategy.plan=plan.json"]
BESIDE_A_NAME = ["strategy.kind=sharded", "strategy.plan=zero2"]
BY_PROFILE = ["strategy.kind=sharded", "strategy.memory=1GB", "strategy.profile=profile.json"]
FOUND_IN_THE_FILE = ["prefetch=1", "reduce_slots=2", "block=1MB", "in_host=true"]


@pytest.mark.parametrize("setting", FOUND_IN_THE_FILE)
def test_what_a_plan_file_says_cannot_be_said_beside_it(setting):
    with pytest.raises(ConfigError, match=r"plan\.json already says it; leave \w+ out"):
        load(RunConfig, None, [*BESIDE_A_FILE, f"strategy.{setting}"])


@pytest.mark.parametrize("setting", FOUND_IN_THE_FILE)
def test_beside_a_preset_it_counts(setting):
    key, value = setting.split("=")
    config = load(RunConfig, None, [*BESIDE_A_NAME, f"strategy.{setting}"]).config.strategy
    assert getattr(config, key) != type(config).model_fields[key].default, value


@pytest.mark.parametrize("start", [BESIDE_A_FILE, BESIDE_A_NAME, BY_PROFILE])
@pytest.mark.parametrize("setting", ["device=h200", "cluster=box 400mbit"])
def test_what_an_estimate_reads_is_refused_where_nothing_is_estimated(start, setting):
    with pytest.raises(ConfigError, match="only with memory and without a profile"):
        load(RunConfig, None, [*start, f"strategy.{setting}"])
