"""Changes of a planning request, and plans for different memory limits."""

import pytest

from stretto.config import load
from stretto.errors import ConfigError
from stretto.planner.profile import Link, Profile, UnitCost
from stretto.planner.unit_choices import PlanConstraints
from stretto.run import RunConfig
from stretto.studies.plan_comparison import (
    PlanRequest,
    allowed_choices,
    apply_changes,
    describe_comparison,
    pareto,
)

pytestmark = pytest.mark.usefixtures("kept_solvers")

UNIT = {"forward_s": 2e-3, "backward_s": 4e-3, "activation_bytes": 400_000}
PROFILE = Profile(
    units=tuple(UnitCost(name=f"blocks.{i}", numel=250_000, **UNIT) for i in range(4)),
    link=Link(ranks=4, latency_s=1e-4, bytes_per_s=2e8, hosts=2),
    state_bytes=8,
)
SETTING = PlanRequest(PROFILE, 16_000_000, PlanConstraints())


def test_a_change_of_memory_changes_only_the_memory_limit():
    other = apply_changes(SETTING, "memory=8GiB")
    assert other.memory_limit == 8 << 30
    assert other.profile == PROFILE


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("rate=10gbit", "bytes_per_s", 10e9 / 8),
        ("latency=50us", "latency_s", 50e-6),
        ("latency=1.5ms", "latency_s", 1.5e-3),
        ("ranks=16", "ranks", 16),
    ],
)
def test_a_change_of_the_link_changes_one_figure_of_it(text, field, value):
    other = apply_changes(SETTING, text)
    link = other.profile.link
    assert getattr(link, field) == pytest.approx(value)
    assert link.model_copy(update={field: getattr(PROFILE.link, field)}) == PROFILE.link
    assert other.profile.units == PROFILE.units
    assert other.memory_limit == SETTING.memory_limit


def test_changes_add_up_in_one_text():
    other = apply_changes(SETTING, "memory=1GB, rate=80gbit,ranks=8")
    assert (other.memory_limit, other.profile.link.bytes_per_s) == (10**9, 1e10)
    assert (other.profile.link.ranks, other.profile.link.latency_s) == (8, 1e-4)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("memroy=8GiB", 'did you mean "memory"'),
        ("memory", "expected word=value"),
        ("", "expected word=value"),
        ("memory=much", "much"),
        ("rate=fast", "fast"),
        ("rate=0gbit", "nothing could be sent"),
        ("latency=50", '"50us" or "1ms"'),
        ("latency=us", '"50us" or "1ms"'),
        ("ranks=5", "a multiple of 2"),
        ("ranks=0", "a multiple of 2"),
        ("ranks=two", "a multiple of 2"),
        ("ranks=4,rnks=8", 'did you mean "ranks"'),
    ],
)
def test_an_invalid_change_is_refused_with_a_hint(text, reason):
    with pytest.raises(ConfigError, match=r".") as refused:
        apply_changes(SETTING, text)
    assert reason in str(refused.value)


def test_more_memory_is_never_slower_between_the_minimum_and_the_maximum():
    points = pareto(SETTING, 3)
    memory_limits, seconds = zip(*points, strict=True)
    assert sorted(memory_limits) == list(memory_limits)
    assert sorted(seconds, reverse=True) == list(seconds)
    assert seconds[0] > 1.05 * seconds[-1], "at this rate memory is worth something"
    with pytest.raises(ConfigError, match="no plan fits"):
        apply_changes(SETTING, f"memory={memory_limits[0] // 2}B").plan()


def test_a_comparison_shows_time_share_and_memory():
    before = SETTING.plan()
    after = apply_changes(SETTING, "rate=100gbit").plan()
    line = describe_comparison("rate=100gbit", before, after)
    assert line.startswith(f"rate=100gbit: {after.step_s * 1e3:.1f} ms a step (-")
    assert "MB" in line


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ([], (False, False, False)),
        (["train.clip_norm=1.0"], (False, True, False)),
        (["optim.kind=lars", "optim.lr=1.0"], (False, False, True)),
        (["strategy.kind=sharded", "strategy.checkpoint=true"], (True, False, False)),
    ],
)
def test_the_constraints_of_a_plan_follow_from_the_run(overrides, found):
    constraints = allowed_choices(load(RunConfig, None, ["optim.lr=0.1", *overrides]).config)
    assert (constraints.checkpoint, constraints.barrier, constraints.whole_layers) == found
