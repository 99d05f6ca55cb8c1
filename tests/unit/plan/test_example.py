"""The plan that the guide shows is valid, and is what the guide says."""

import re
from pathlib import Path

from torch import nn

from stretto.plan.check import check
from stretto.plan.value import Plan
from stretto.strategy.sharded.config import ShardedConfig, checked_plan

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "sharding.md"


def test_the_plan_of_the_guide_is_zero3_just_in_time():
    (shown,) = re.findall(r"^```json\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    plan = Plan.model_validate_json(shown)
    check(plan)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    assert plan == checked_plan(ShardedConfig(plan="zero3", prefetch=0, unit=0), model)
