"""Small plans for tests, and ways to break them."""

from stretto.plan.presets import Shape, Wish, named_plan
from stretto.plan.value import Message, Plan, What

SHAPES = (Shape("in", 40), Shape("mid", 100), Shape("out", 70))
"""Three units: slots are b2, b1, b0, update, f0, f1, f2."""


def plan_of(name: str, **wish: object) -> Plan:
    return named_plan(name, SHAPES, Wish(**wish))


def place(plan: Plan, what: What, unit: int, block: int = 0) -> int:
    """Return where a message stands in the order."""
    keys = [(m.what, m.unit, m.block) for m in plan.messages]
    return keys.index((what, unit, block))


def moved(plan: Plan, what: What, unit: int, **slots: int) -> Plan:
    """Return ``plan`` with another gate or due slot for one message."""
    messages = list(plan.messages)
    index = place(plan, what, unit)
    messages[index] = messages[index].model_copy(update=slots)
    return plan.replace(messages=tuple(messages))


def without(plan: Plan, what: What, unit: int, block: int = 0) -> Plan:
    index = place(plan, what, unit, block)
    return plan.replace(messages=plan.messages[:index] + plan.messages[index + 1 :])


def with_more(plan: Plan, *messages: Message) -> Plan:
    return plan.replace(messages=(*plan.messages, *messages))


def put_first(plan: Plan, what: What, unit: int, block: int = 0) -> Plan:
    index = place(plan, what, unit, block)
    rest = plan.messages[:index] + plan.messages[index + 1 :]
    return plan.replace(messages=(plan.messages[index], *rest))


def put_last(plan: Plan, what: What, unit: int, block: int = 0) -> Plan:
    index = place(plan, what, unit, block)
    rest = plan.messages[:index] + plan.messages[index + 1 :]
    return plan.replace(messages=(*rest, plan.messages[index]))
