"""The plan in the guide is valid, and is the one that the guide describes."""

import re
from pathlib import Path

from torch import nn

from stretto.planner.check import check
from stretto.planner.plan import Plan
from stretto.strategies.sharded.config import ShardedConfig, checked_plan

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "sharding-and-planning.md"


def test_the_plan_of_the_guide_is_zero3_just_in_time():
    (shown,) = re.findall(r"^```json\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    plan = Plan.model_validate_json(shown)
    check(plan)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    assert plan == checked_plan(ShardedConfig(plan="zero3", prefetch=0, unit=0), model)
