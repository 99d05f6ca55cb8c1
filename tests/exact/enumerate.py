"""Finds the best plan of 1 to 3 whole units by enumeration, without a solver.

All shardings and all orders are tried, except for these, which cannot be better:

- For the same order, an earlier gate or a later due slot never makes a plan slower, because an arc
  of its `Graph` then comes from an earlier slot or goes to a later one. So only the widest windows
  that fit into memory count. The search starts from the widest windows and narrows one message at a
  time. A plan that cannot be faster than the best one is not narrowed further. (An unshard for
  backward is in another cycle's order if its gate is in backward instead of forward. The two cases
  are tried separately.)
- Memory depends on shardings, gates and dues, not on the order: if one order fits, all do.
- A partial order is dropped if `Graph.can_repeat` says that no order that begins so is faster, or
  if an unshard comes before its reduction.
- A later gate of a reduction, or of parameters that stay unsharded, saves no memory.
- Times are whole quanta, so "faster" means faster by at least one quantum.
"""

from collections.abc import Iterator
from itertools import product

from stretto.planner.check import allowed_window, check, unwrapped_window
from stretto.planner.memory import Footprints
from stretto.planner.plan import MessageKind, Plan, PlanMessage, Sharding, Slots
from stretto.planner.presets import MessageTiming, build_plan
from stretto.planner.unit_choices import UnitChoice, make_unit
from tests.exact.instances import Instance, frugal_plan
from tests.exact.repeating import Graph, steady_quanta


def best_plan(instance: Instance) -> Plan:
    """Return a fastest plan that fits into memory."""
    return _Search(instance).run()


class _Search:
    """The best plan so far."""

    def __init__(self, instance: Instance) -> None:
        self._profile, self._memory_limit = instance.profile, instance.memory_limit
        self._barrier, self._footprints = instance.barrier, Footprints(instance.profile)
        self._best = frugal_plan(instance.profile, barrier=instance.barrier)
        self._quanta = steady_quanta(self._best, instance.profile)

    def run(self) -> Plan:
        """Try every sharding with every kind of window, plans with little communication first."""
        plans = [plan for kinds in self._shardings() for plan in self._widest(kinds)]
        for plan in sorted(plans, key=lambda plan: sum(Graph(plan, self._profile).taken)):
            for feasible in self._feasible_plans(plan):
                self._try_orders(feasible, Graph(feasible, self._profile), ())
        return self._best

    def _shardings(self) -> Iterator[tuple[Sharding, ...]]:
        allowed = [
            [kind for kind in Sharding if not (unit.used_often and kind is Sharding.ZERO3)]
            for unit in self._profile.units
        ]
        return product(*allowed)

    def _widest(self, kinds: tuple[Sharding, ...]) -> Iterator[Plan]:
        """Yield plans with the widest windows, with each unshard for backward in either cycle."""
        units = tuple(make_unit(self._profile, i, UnitChoice(kind)) for i, kind in enumerate(kinds))
        last = len(kinds) - 1
        freed = [i for i, kind in enumerate(kinds) if kind is Sharding.ZERO3 and i < last]
        for early in product([False, True], repeat=len(freed)):
            ahead = {unit for unit, is_early in zip(freed, early, strict=True) if is_early}
            yield build_plan(
                units, self._timing(units, ahead), barrier=self._barrier, whole_layers=False
            )

    def _timing(self, units: tuple, ahead: set[int]):
        bare = Plan(units=units, messages=(), barrier=self._barrier)

        def timing(slots: Slots, what: MessageKind, unit: int, _block: int) -> MessageTiming:
            gate, due = allowed_window(bare, what, unit)
            if what is MessageKind.UNSHARD_FOR_BACKWARD and unit not in ahead:
                gate = slots.count
            return MessageTiming(gate, due, 2 * gate)

        return timing

    def _feasible_plans(self, widest: Plan) -> Iterator[Plan]:
        """Yield the plans that fit into memory, without those narrower than another that fits."""
        waiting, seen = [widest], {widest.messages}
        while waiting:
            plan = waiting.pop()
            if not Graph(plan, self._profile).can_repeat(self._quanta - 1, ()):
                continue
            if self._footprints.peak(plan) <= self._memory_limit:
                yield plan
                continue
            for narrower in _narrowed(plan):
                if narrower.messages not in seen:
                    seen.add(narrower.messages)
                    waiting.append(narrower)

    def _try_orders(self, plan: Plan, graph: Graph, begun: tuple[int, ...]) -> None:
        """Extend a partial order in every way that may be faster than the best plan."""
        if not graph.can_repeat(self._quanta - 1, begun):
            return
        if len(begun) == len(plan.messages):
            self._take(plan.replace(messages=tuple(plan.messages[i] for i in begun)))
            return
        reduced = {
            plan.messages[i].unit for i in begun if plan.messages[i].what is MessageKind.REDUCE
        }
        for index, message in enumerate(plan.messages):
            ready = message.what is not MessageKind.UNSHARD or message.unit in reduced
            if index not in begun and ready:
                self._try_orders(plan, graph, (*begun, index))

    def _take(self, plan: Plan) -> None:
        check(plan)
        taken = steady_quanta(plan, self._profile)
        assert taken < self._quanta
        self._best, self._quanta = plan, taken


def _narrowed(plan: Plan) -> Iterator[Plan]:
    """Yield the plans in which one message has its gate a slot later or its due a slot earlier."""
    for index, message in enumerate(plan.messages):
        for changed in _narrower(plan, message):
            messages = (*plan.messages[:index], changed, *plan.messages[index + 1 :])
            yield plan.replace(messages=messages)


def _narrower(plan: Plan, message: PlanMessage) -> Iterator[PlanMessage]:
    slots = plan.slots
    if message.what is MessageKind.REDUCE:  # a later gate would save no memory
        if message.due > slots.backward(message.unit) + 1:
            yield message.model_copy(update={"due": message.due - 1})
        return
    gate, due = unwrapped_window(slots, message)
    stays = not plan.units[message.unit].sharding.shards_parameters
    changes_cycle = message.what is MessageKind.UNSHARD_FOR_BACKWARD and gate + 1 == slots.count
    if gate < due and not stays and not changes_cycle:
        yield message.model_copy(update={"gate": (gate + 1) % slots.count})
