"""Small plans for tests, and ways to break them."""

from stretto.planner.plan import MessageKind, Plan, PlanMessage
from stretto.planner.presets import PresetOptions, UnitShape, preset_plan

SHAPES = (UnitShape("in", 40), UnitShape("mid", 100), UnitShape("out", 70))
"""Three units: slots are b2, b1, b0, update, f0, f1, f2."""


def plan_of(name: str, **preset_options: object) -> Plan:
    return preset_plan(name, SHAPES, PresetOptions(**preset_options))


def position_of(plan: Plan, what: MessageKind, unit: int, block: int = 0) -> int:
    """Return the index of a message in the order of the plan."""
    keys = [(m.what, m.unit, m.block) for m in plan.messages]
    return keys.index((what, unit, block))


def moved(plan: Plan, what: MessageKind, unit: int, **slots: int) -> Plan:
    """Return ``plan`` with another gate or due slot for one message."""
    messages = list(plan.messages)
    index = position_of(plan, what, unit)
    messages[index] = messages[index].model_copy(update=slots)
    return plan.replace(messages=tuple(messages))


def without(plan: Plan, what: MessageKind, unit: int, block: int = 0) -> Plan:
    index = position_of(plan, what, unit, block)
    return plan.replace(messages=plan.messages[:index] + plan.messages[index + 1 :])


def with_more(plan: Plan, *messages: PlanMessage) -> Plan:
    return plan.replace(messages=(*plan.messages, *messages))


def put_first(plan: Plan, what: MessageKind, unit: int, block: int = 0) -> Plan:
    index = position_of(plan, what, unit, block)
    rest = plan.messages[:index] + plan.messages[index + 1 :]
    return plan.replace(messages=(plan.messages[index], *rest))


def put_last(plan: Plan, what: MessageKind, unit: int, block: int = 0) -> Plan:
    index = position_of(plan, what, unit, block)
    rest = plan.messages[:index] + plan.messages[index + 1 :]
    return plan.replace(messages=(*rest, plan.messages[index]))
