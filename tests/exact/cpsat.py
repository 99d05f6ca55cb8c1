"""Finds the provably best plan of whole units with OR-Tools: `python -m tests.exact.cpsat`.

The program reads problems from standard input, one JSON object a line (see `tests.exact.problem`),
and writes one answer for each. No test imports this module: OR-Tools brings its own HiGHS library,
which cannot be in one process with that of scipy.

The model is a cycle that repeats every T quanta. Slot t starts at S_t and ends at E_t. Slot 0
starts at time 0, so T is the end of the last slot. Message i starts at s_i and takes d_i::

    S_t >= E_(t-1)            one slot after another
    s_i >= E_a                a is the slot before the gate of i; for a reduction at least its
                              backward, for an unshard behind a barrier at least the update
    s_unshard >= s_i + d_i    i is the reduction of the same unit
    S_due >= s_i + d_i        S_due + T (the next cycle) for an unshard for backward with its gate
                              in forward
    one message at a time; all messages of a cycle before those of the next

A solution is a plan with the messages in the order of s. The executor starts each message as early
as that order allows, which delays nothing. There is no deadlock, since every message takes time and
all messages before it start before it. Memory is a sum that depends on shardings, gates and dues.
"""

import json
import sys
import time
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

MESSAGE_KINDS = ("reduce", "unshard", "unshard_for_backward")
WindowOption = dict[str, Any]


class Chosen(NamedTuple):
    """An option, and the variable that says whether it is taken."""

    taken: cp_model.IntVar
    unit: int
    what: str
    option: WindowOption


class Model:
    """The CP-SAT model of one problem."""

    def __init__(self, problem: dict[str, Any]) -> None:
        self.cp = cp_model.CpModel()
        self._problem = problem
        self._begins = [self._time(f"slot {t}") for t in range(len(problem["lengths"]))]
        self._ends = [s + p for s, p in zip(self._begins, problem["lengths"], strict=True)]
        self.step = self._ends[-1]
        self.cp.add(self.step <= problem["most"])
        self._first, self._last = self._time("first"), self._time("last")
        self._intervals: list[cp_model.IntervalVar] = []
        self.starts: dict[tuple[int, str], cp_model.IntVar] = {}
        self.choices: list[Chosen] = []
        for before, after in pairwise(range(len(self._ends))):
            self.cp.add(self._begins[after] >= self._ends[before])
        for index, unit in enumerate(problem["units"]):
            self._add_unit(index, unit)
        self._share_link()
        self._respect_memory_limit()
        self.cp.minimize(self.step)

    def _time(self, name: str) -> cp_model.IntVar:
        return self.cp.new_int_var(0, 2 * self._problem["most"], name)

    def _add_unit(self, index: int, unit: dict[str, list[WindowOption]]) -> None:
        """Let the solver choose one sharding, and one option for each of its messages."""
        kinds = {option["sharding"] for option in unit["reduce"]}
        sharding = {kind: self.cp.new_bool_var(f"{kind} {index}") for kind in sorted(kinds)}
        self.cp.add_exactly_one(sharding.values())
        for what in MESSAGE_KINDS:
            self.starts[index, what] = self._time(f"{what} {index}")
            for kind, options in groupby(unit[what], key=lambda option: option["sharding"]):
                self._add_message(index, what, list(options), sharding[kind])

    def _add_message(
        self, unit: int, what: str, options: list[WindowOption], is_chosen: cp_model.IntVar
    ) -> None:
        """Take one of ``options``, all of one sharding, if that sharding ``is_chosen``."""
        start, length = self.starts[unit, what], options[0]["length"]
        end = start + length
        name = f"{what} {unit} {options[0]['sharding']}"
        interval = self.cp.new_optional_interval_var(start, length, end, is_chosen, name)
        self._intervals.append(interval)
        self.cp.add(self._first <= start).only_enforce_if(is_chosen)
        self.cp.add(self._last >= end).only_enforce_if(is_chosen)
        if what == "unshard":
            reduced = self.starts[unit, "reduce"] + options[0]["reduced"]
            self.cp.add(start >= reduced).only_enforce_if(is_chosen)
        taken = []
        for option in options:
            choice = self.cp.new_bool_var(f"{name} {option['gate']} {option['due']}")
            self.cp.add(start >= self._end(option["after"])).only_enforce_if(choice)
            ahead = self.step if option["ahead"] else 0
            self.cp.add(self._begins[option["due"]] + ahead >= end).only_enforce_if(choice)
            self.choices.append(Chosen(choice, unit, what, option))
            taken.append(choice)
        self.cp.add(sum(taken) == is_chosen)

    def _end(self, slot: int) -> cp_model.LinearExprT:
        return self._ends[slot] if slot >= 0 else 0

    def _share_link(self) -> None:
        self.cp.add_no_overlap(self._intervals)
        self.cp.add(self._last - self._first <= self.step)
        # Implied by the two constraints above, but it helps the solver.
        busy = sum(one.taken * one.option["length"] for one in self.choices)
        self.cp.add(self.step >= busy)

    def _respect_memory_limit(self) -> None:
        for moment, other in enumerate(self._problem["other"]):
            kept = sum(one.taken * one.option["kept"][moment] for one in self.choices)
            self.cp.add(kept + other <= self._problem["memory_limit"])


def solve(problem: dict[str, Any]) -> dict[str, Any]:
    """Return the messages of the best plan in order, its time and memory, and the status."""
    began_s = time.monotonic()
    model, solver = Model(problem), cp_model.CpSolver()
    solver.parameters.num_workers = 2
    solver.parameters.max_time_in_seconds = problem["limit_s"]
    status = solver.solve(model.cp)
    answer = {"status": solver.status_name(status), "seconds": time.monotonic() - began_s}
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return answer
    taken = [one for one in model.choices if solver.value(one.taken)]
    taken.sort(key=lambda one: solver.value(model.starts[one.unit, one.what]))
    kept = [sum(moment) for moment in zip(*(one.option["kept"] for one in taken), strict=True)]
    keys = ("sharding", "gate", "due")
    return answer | {
        "step": solver.value(model.step),
        "peak": max(sum(both) for both in zip(kept, problem["other"], strict=True)),
        "messages": [
            {"what": one.what, "unit": one.unit} | {key: one.option[key] for key in keys}
            for one in taken
        ],
    }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(solve(json.loads(line))), flush=True)
