"""The best plan of whole units by looking at all of them, for 1 to 3 units; no solver.

What need not be looked at, and why:

- In the same order a plan with a gate that is earlier, or a due slot that is later, is never
  slower: an arc of its `Graph` comes from an earlier slot, or goes to a later one. (A regather with
  its gate in backward stands in another cycle's order than one with its gate in forward: the two
  are looked at apart.) So only windows count that fit into memory while no wider ones do. They are
  found from the widest on, by narrowing one message at a time; what cannot be faster than the best
  plan known is not narrowed further, since that makes nothing faster.
- Memory depends on shardings, gates and dues, and not on the order: what fits fits in any.
- An order is not continued if it cannot be faster: `Graph.can_repeat` says no only if none that
  begins so can repeat in that time. Nor is one in which a gather stands before its reduction.
- A later gate of a reduction, or of parameters that stay, keeps nothing less.
- Times are whole quanta, so "faster" is faster by one at least.

Nothing else is left out: all shardings, all orders.
"""

from collections.abc import Iterator
from itertools import product

from stretto.plan.building import When, build
from stretto.plan.check import check, own_slots, window
from stretto.plan.footprint import Footprints
from stretto.plan.options import Choice, unit_of
from stretto.plan.slots import Slots
from stretto.plan.value import Message, Plan, Sharding, What
from tests.exact.instances import Instance, frugal_plan
from tests.exact.repeating import Graph, steady_quanta


def best_plan(instance: Instance) -> Plan:
    """Return a plan that fits, and than which none is faster."""
    return _Search(instance).run()


class _Search:
    """The best plan so far."""

    def __init__(self, instance: Instance) -> None:
        self._profile, self._budget = instance.profile, instance.budget
        self._barrier, self._footprints = instance.barrier, Footprints(instance.profile)
        self._best = frugal_plan(instance.profile, barrier=instance.barrier)
        self._quanta = steady_quanta(self._best, instance.profile)

    def run(self) -> Plan:
        """Look at every sharding with every sort of window; the fewer messages, the sooner."""
        plans = [plan for kinds in self._shardings() for plan in self._widest(kinds)]
        for plan in sorted(plans, key=lambda plan: sum(Graph(plan, self._profile).taken)):
            for fitting in self._fitting(plan):
                self._look_at_orders(fitting, Graph(fitting, self._profile), ())
        return self._best

    def _shardings(self) -> Iterator[tuple[Sharding, ...]]:
        allowed = [
            [kind for kind in Sharding if not (unit.used_often and kind is Sharding.ZERO3)]
            for unit in self._profile.units
        ]
        return product(*allowed)

    def _widest(self, kinds: tuple[Sharding, ...]) -> Iterator[Plan]:
        """Yield plans with the widest windows there are, in no order: regathers in each cycle."""
        units = tuple(unit_of(self._profile, i, Choice(kind)) for i, kind in enumerate(kinds))
        last = len(kinds) - 1
        freed = [i for i, kind in enumerate(kinds) if kind is Sharding.ZERO3 and i < last]
        for early in product([False, True], repeat=len(freed)):
            ahead = {unit for unit, is_early in zip(freed, early, strict=True) if is_early}
            yield build(
                units, self._timing(units, ahead), barrier=self._barrier, whole_layers=False
            )

    def _timing(self, units: tuple, ahead: set[int]):
        bare = Plan(units=units, messages=(), barrier=self._barrier)

        def timing(slots: Slots, what: What, unit: int, _block: int) -> When:
            gate, due = window(bare, what, unit)
            if what is What.REGATHER and unit not in ahead:
                gate = slots.count
            return When(gate, due, 2 * gate)

        return timing

    def _fitting(self, widest: Plan) -> Iterator[Plan]:
        """Yield the plans that fit and are not narrower than another that does."""
        waiting, seen = [widest], {widest.messages}
        while waiting:
            plan = waiting.pop()
            if not Graph(plan, self._profile).can_repeat(self._quanta - 1, ()):
                continue
            if self._footprints.peak(plan) <= self._budget:
                yield plan
                continue
            for narrower in _narrowed(plan):
                if narrower.messages not in seen:
                    seen.add(narrower.messages)
                    waiting.append(narrower)

    def _look_at_orders(self, plan: Plan, graph: Graph, begun: tuple[int, ...]) -> None:
        """Continue an order in every way that may be faster than the best plan."""
        if not graph.can_repeat(self._quanta - 1, begun):
            return
        if len(begun) == len(plan.messages):
            self._take(plan.replace(messages=tuple(plan.messages[i] for i in begun)))
            return
        reduced = {plan.messages[i].unit for i in begun if plan.messages[i].what is What.REDUCE}
        for index, message in enumerate(plan.messages):
            ready = message.what is not What.GATHER or message.unit in reduced
            if index not in begun and ready:
                self._look_at_orders(plan, graph, (*begun, index))

    def _take(self, plan: Plan) -> None:
        check(plan)
        taken = steady_quanta(plan, self._profile)
        assert taken < self._quanta
        self._best, self._quanta = plan, taken


def _narrowed(plan: Plan) -> Iterator[Plan]:
    """Yield the plans in which one message begins a slot later, or is due a slot sooner."""
    for index, message in enumerate(plan.messages):
        for changed in _narrower(plan, message):
            messages = (*plan.messages[:index], changed, *plan.messages[index + 1 :])
            yield plan.replace(messages=messages)


def _narrower(plan: Plan, message: Message) -> Iterator[Message]:
    slots = plan.slots
    if message.what is What.REDUCE:  # a later gate would keep nothing less
        if message.due > slots.backward(message.unit) + 1:
            yield message.model_copy(update={"due": message.due - 1})
        return
    gate, due = own_slots(slots, message)
    stays = not plan.units[message.unit].sharding.is_freed
    changes_cycle = message.what is What.REGATHER and gate + 1 == slots.count
    if gate < due and not stays and not changes_cycle:
        yield message.model_copy(update={"gate": (gate + 1) % slots.count})
