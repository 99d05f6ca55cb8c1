"""Plan files: a written plan is read back unchanged, and a file that holds no plan is refused."""

import json

import pytest

from stretto.errors import ConfigError
from stretto.planner.plan import PLAN_SCHEMA, MessageKind, Plan, Slots, read_plan
from stretto.planner.presets import PLAN_PRESETS, random_plan
from tests.unit.planner.examples import SHAPES, moved, plan_of

PLANS = [
    *(plan_of(name) for name in PLAN_PRESETS),
    *(random_plan(SHAPES, seed) for seed in range(20)),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.digest())
def test_a_written_plan_is_read_back_unchanged(plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    again = read_plan(path)
    assert again == plan
    assert again.digest() == plan.digest()


def test_equal_plans_have_equal_digests_and_any_change_gives_another():
    plan = plan_of("zero2")
    assert plan.digest() == plan_of("zero2").digest()
    others = [
        plan_of("zero3"),
        plan.replace(whole_layers=True),
        plan.replace(messages=plan.messages[::-1]),
        moved(plan, MessageKind.UNSHARD, 1, gate=4),
        plan.replace(units=(plan.units[0].model_copy(update={"name": "inn"}), *plan.units[1:])),
    ]
    assert len({one.digest() for one in [plan, *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "the whole: Invalid JSON"),
        ("[]", "the whole: "),
        ("{}", "units: Field required"),
        ('{"units": [], "messages": [], "ranks": 4}', "ranks: Extra inputs"),
        ('{"units": [], "messages": [{"what": "send"}]}', r"messages\.0\.what: .*'reduce'"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_with_the_place(text, reason, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"plan\.json is not a plan: {reason}"):
        read_plan(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("numel", 0), ("numel", 4.5), ("sharding", "zero4"), ("blocks", [0]), ("checkpoint", 1)],
)
def test_invalid_fields_of_a_unit_are_refused(key, value):
    fields = json.loads(plan_of("zero2").to_json())
    fields["units"][0][key] = value
    with pytest.raises(ValueError, match=rf"units\.0\.{key}"):
        Plan.model_validate_json(json.dumps(fields))


def test_a_plan_of_another_version_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan_of("zero2").replace(schema_version=PLAN_SCHEMA + 1).to_json())
    with pytest.raises(
        ConfigError, match=rf"a plan of version {PLAN_SCHEMA + 1}, .* reads {PLAN_SCHEMA}"
    ):
        read_plan(path)


def test_a_file_that_is_missing_or_not_text_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the plan .*none\.json: No such file"):
        read_plan(tmp_path / "none.json")
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is not text"):
        read_plan(path)


def test_a_cycle_goes_from_the_last_backward_to_the_last_forward():
    slots = Slots(3)
    assert [slots.name(slot) for slot in range(slots.count)] == [
        "b2",
        "b1",
        "b0",
        "update",
        "f0",
        "f1",
        "f2",
    ]
    assert [slots.backward(unit) for unit in range(3)] == [2, 1, 0]
    assert [slots.forward(unit) for unit in range(3)] == [4, 5, 6]
    assert slots.name(8) == "b1 of the cycle after"
    assert slots.name(-1) == "f2 of the cycle before"
