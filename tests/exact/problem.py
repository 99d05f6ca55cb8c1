"""An instance as plain numbers for `tests.exact.cpsat`, and its answer as a plan.

For each unit and sort of message there is a list of options: a sharding with a gate and a due slot,
how long the link is busy with it, and what it keeps at each moment of a cycle. What is always kept
is with the reduction, which every sharding has. An option that keeps what a looser one keeps (an
earlier gate, a later due slot) is left out, since it is never faster: of a reduction, which keeps
nothing less by waiting, there is the first gate only.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from stretto.plan.check import check
from stretto.plan.footprint import Footprints
from stretto.plan.memory import Holding
from stretto.plan.options import Choice, unit_of
from stretto.plan.presets import PRESETS, Wish, named_plan
from stretto.plan.slots import Slots
from stretto.plan.timing import time_plan
from stretto.plan.value import Message, Plan, Sharding, What
from tests.exact.instances import QUANTUM_S, Instance, frugal_plan
from tests.exact.repeating import quanta, steady_quanta

ROOT = Path(__file__).parents[2]
_MOMENTS = 3
"""Of a slot, as memory is charged: it is entered, it runs, it is left."""

Span = tuple[int, int, int]
"""First and last moment, and bytes; moments may be those of the next cycle."""


class Exact(NamedTuple):
    """What a solver found."""

    plan: Plan
    step_s: float
    proven: bool
    seconds: float


def solver_python() -> str | None:
    """Return an interpreter that has OR-Tools; its pins are not ours, so it may live apart."""
    apart = Path(sys.prefix, "exact", "bin", "python")
    return next((p for p in (sys.executable, str(apart)) if _has_ortools(p)), None)


@cache
def _has_ortools(python: str) -> bool:
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('ortools') is None)"
    try:
        return subprocess.run([python, "-c", look], check=False, timeout=60).returncode == 0
    except FileNotFoundError:
        return False


def solve(instances: Sequence[Instance], limit_s: float = 20.0) -> list[Exact]:
    """Return the best plan of each instance, found in a process of its own.

    Raises:
        AssertionError: The plan cannot be carried out, or has another time or memory than found.
    """
    python = solver_python()
    assert python is not None, "no interpreter has OR-Tools"
    problems = [json.dumps(problem_of(one) | {"limit_s": limit_s}) for one in instances]
    done = subprocess.run(
        [python, "-m", "tests.exact.cpsat"],
        input="\n".join(problems),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=60 + 2 * limit_s * len(instances),
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return [_confirmed(one, answer) for one, answer in zip(instances, answers, strict=True)]


def _confirmed(instance: Instance, answer: dict[str, Any]) -> Exact:
    """Return the answer as a plan that has been checked, timed and charged by those who know."""
    assert "messages" in answer, f"the solver says {answer['status']}"
    plan = plan_of(instance, answer["messages"])
    check(plan)
    step_s, proven = answer["step"] * QUANTUM_S, answer["status"] == "OPTIMAL"
    assert Footprints(instance.profile).peak(plan) == answer["peak"] <= instance.budget
    timed_s = time_plan(plan, instance.profile).step_s
    late = timed_s / step_s - 1
    assert abs(late) < 1e-6 if proven else late < 1e-6, f"found {step_s} s, timed {timed_s} s"
    return Exact(plan, timed_s, proven, answer["seconds"])


def plan_of(instance: Instance, messages: Sequence[dict[str, Any]]) -> Plan:
    """Return the plan with these messages, each of which names its unit's sharding."""
    kinds = {m["unit"]: Sharding(m["sharding"]) for m in messages}
    units = [unit_of(instance.profile, i, Choice(kind)) for i, kind in sorted(kinds.items())]
    keys = ("what", "unit", "gate", "due")
    return Plan(
        units=tuple(units),
        messages=tuple(Message(block=0, **{key: m[key] for key in keys}) for m in messages),
        barrier=instance.barrier,
    )


def problem_of(instance: Instance) -> dict[str, Any]:
    """Return an instance as numbers: times in quanta, bytes as they are."""
    profile = instance.profile
    shapes = [unit_of(profile, i, Choice(Sharding.ZERO3)) for i in range(len(profile.units))]
    bare = Plan(units=tuple(shapes), messages=(), barrier=instance.barrier)
    other = Footprints(profile).activations(bare)
    lengths_s = profile.lengths([False] * len(shapes), barrier=instance.barrier)
    units = [_Options(instance, index).all() for index in range(len(shapes))]
    return {
        "lengths": [quanta(length_s) for length_s in lengths_s],
        "budget": instance.budget,
        "other": [num_bytes for num_bytes in other for _ in range(_MOMENTS)],
        "units": units,
        "most": _known_quanta(instance),
    }


def _known_quanta(instance: Instance) -> int:
    """Return what the best plan takes for which nobody has to search; else what any plan takes."""
    profile, footprints = instance.profile, Footprints(instance.profile)
    wish = Wish(barrier=instance.barrier)
    plans = [named_plan(name, profile.shapes, wish) for name in PRESETS]
    plans.append(frugal_plan(profile, barrier=instance.barrier))
    fitting = [plan for plan in plans if footprints.peak(plan) <= instance.budget]
    if fitting:
        return min(steady_quanta(plan, profile) for plan in fitting)
    return quanta(profile.compute_s + profile.update_s + profile.channel_s(plans[-1]))


class _Options:
    """The options of one unit."""

    def __init__(self, instance: Instance, unit: int) -> None:
        self._profile, self._barrier = instance.profile, instance.barrier
        self._slots, self._unit = Slots(len(instance.profile.units)), unit
        self._backward, self._forward = self._slots.backward(unit), self._slots.forward(unit)
        self._used_often = instance.profile.units[unit].used_often
        self._footprints = Footprints(instance.profile)

    def all(self) -> dict[str, list[dict[str, Any]]]:
        """Return them by sort of message, those of one sharding beside each other."""
        kinds = [kind for kind in Sharding if self._counts(kind)]
        split = [kind for kind in kinds if kind.is_split]
        return {
            "reduce": [option for kind in kinds for option in _loosest(self._reductions(kind))],
            "gather": [option for kind in split for option in _loosest(self._gathers(kind))],
            "regather": [*self._regathers()] if Sharding.ZERO3 in kinds else [],
        }

    def _counts(self, kind: Sharding) -> bool:
        """Say whether a sharding is allowed, and not in every way worse than another."""
        if kind is not Sharding.ZERO1:
            return not (self._used_often and kind is Sharding.ZERO3)
        # With the same messages it keeps room for gradients, where the other takes it for a while.
        other = self._held(Sharding.SDP)
        most = other.always + sum(other.gradients) + sum(other.reduced)
        return self._held(kind).always < most

    def _reductions(self, kind: Sharding) -> Iterator[dict[str, Any]]:
        slots, held = self._slots, self._held(kind)
        always = (0, _left(slots.count - 1), held.always)
        last = slots.update if self._barrier else self._forward
        first = 0 if self._used_often else self._backward
        for due in range(last, self._backward, -1):
            over = _runs(slots.update) if self._barrier else _entered(due)
            sent = over if held.in_place else _entered(due)
            spans = [
                always,
                (_runs(first), sent, sum(held.gradients)),
                (_left(self._backward), over, sum(held.reduced)),
            ]
            yield self._option(What.REDUCE, kind, (self._backward, due), self._backward, spans)

    def _gathers(self, kind: Sharding) -> Iterator[dict[str, Any]]:
        slots, held, due = self._slots, self._held(kind), self._forward
        first = slots.update if self._barrier else self._backward + 1
        used = slots.count + self._backward if kind is Sharding.ZERO2 else due
        reduced = self._quanta(What.REDUCE, kind)
        for gate in range(first, due + 1):
            begins = max(_entered(gate), _left(slots.update)) if self._barrier else _entered(gate)
            spans = [(begins, _runs(used), held.gathered)]
            if kind is Sharding.ZERO2:
                spans.append((_runs(due), _entered(used), -held.inside))
            after = max(gate - 1, slots.update) if self._barrier else gate - 1
            option = self._option(What.GATHER, kind, (gate, due), after, spans)
            yield option | {"reduced": reduced}

    def _regathers(self) -> Iterator[dict[str, Any]]:
        used, kind = self._slots.count + self._backward, Sharding.ZERO3
        for gate in range(self._forward + 1, used + 1):
            slot = gate % self._slots.count
            spans = [(_entered(gate), _runs(used), self._held(kind).gathered)]
            option = self._option(What.REGATHER, kind, (slot, self._backward), slot - 1, spans)
            yield option | {"ahead": gate < self._slots.count}

    def _option(
        self, what: What, kind: Sharding, window: tuple[int, int], after: int, spans: list[Span]
    ) -> dict[str, Any]:
        return {
            "sharding": str(kind),
            "gate": window[0],
            "due": window[1],
            "after": after,
            "ahead": False,
            "length": self._quanta(what, kind),
            "kept": self._folded(spans),
        }

    def _folded(self, spans: Sequence[Span]) -> list[int]:
        """Return the bytes at each moment; what a cycle leaves is there beside the next one's."""
        kept = [0] * (_MOMENTS * self._slots.count)
        for first, last, num_bytes in spans:
            for moment in range(first, last + 1):
                kept[moment % len(kept)] += num_bytes
        return kept

    def _held(self, kind: Sharding) -> Holding:
        unit = unit_of(self._profile, self._unit, Choice(kind))
        return self._footprints.of_unit(self._unit, unit, self._barrier)

    def _quanta(self, what: What, kind: Sharding) -> int:
        unit = unit_of(self._profile, self._unit, Choice(kind))
        return quanta(self._profile.carried_s(unit, what, unit.numel))


def _loosest(options: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield those that keep something else than all before them, which are looser."""
    seen: list[list[int]] = []
    for option in options:
        if option["kept"] not in seen:
            seen.append(option["kept"])
            yield option


def _entered(slot: int) -> int:
    return _MOMENTS * slot


def _runs(slot: int) -> int:
    return _MOMENTS * slot + 1


def _left(slot: int) -> int:
    return _MOMENTS * slot + 2
