"""Converts an instance to plain numbers for `tests.exact.cpsat`, and the answer to a plan.

For each unit and kind of message there is a list of options. An option is a sharding with a gate
and a due slot, the time on the link, and the bytes in memory at each moment of a cycle. Bytes that
are always in memory count with the reduction, which every sharding has.

An option is left out if a wider window (earlier gate, later due slot) needs the same memory, since
it is never faster. A reduction saves no memory by waiting, so only its first gate is an option.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from stretto.planner.check import check
from stretto.planner.memory import Footprints, UnitMemory
from stretto.planner.plan import MessageKind, Plan, PlanMessage, Sharding, Slots
from stretto.planner.presets import PLAN_PRESETS, PresetOptions, preset_plan
from stretto.planner.timing import time_plan
from stretto.planner.unit_choices import UnitChoice, make_unit
from tests.exact.instances import QUANTUM_S, Instance, frugal_plan
from tests.exact.repeating import quanta, steady_quanta

ROOT = Path(__file__).parents[2]
_MOMENTS = 3
"""Moments of a slot at which memory is counted: when it is entered, runs, and is left."""

Span = tuple[int, int, int]
"""(first moment, last moment, bytes); moments may belong to the next cycle."""


class Exact(NamedTuple):
    """The answer of the solver."""

    plan: Plan
    step_s: float
    proven: bool
    seconds: float


def solver_python() -> str | None:
    """Return a Python that has OR-Tools, maybe in an environment of its own, or None."""
    separate = Path(sys.prefix, "exact", "bin", "python")
    return next((p for p in (sys.executable, str(separate)) if _has_ortools(p)), None)


@cache
def _has_ortools(python: str) -> bool:
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('ortools') is None)"
    try:
        return subprocess.run([python, "-c", look], check=False, timeout=60).returncode == 0
    except FileNotFoundError:
        return False


def solve(instances: Sequence[Instance], limit_s: float = 20.0) -> list[Exact]:
    """Return the best plan of each instance, found in a separate process.

    Raises:
        AssertionError: The plan is invalid, or has another time or memory than the solver says.
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
    """Return the answer as a plan, after checking it, its time and its memory."""
    assert "messages" in answer, f"the solver says {answer['status']}"
    plan = plan_of(instance, answer["messages"])
    check(plan)
    step_s, proven = answer["step"] * QUANTUM_S, answer["status"] == "OPTIMAL"
    assert Footprints(instance.profile).peak(plan) == answer["peak"] <= instance.memory_limit
    timed_s = time_plan(plan, instance.profile).step_s
    late = timed_s / step_s - 1
    assert abs(late) < 1e-6 if proven else late < 1e-6, f"found {step_s} s, timed {timed_s} s"
    return Exact(plan, timed_s, proven, answer["seconds"])


def plan_of(instance: Instance, messages: Sequence[dict[str, Any]]) -> Plan:
    """Return the plan with these messages, each of which has the sharding of its unit."""
    kinds = {m["unit"]: Sharding(m["sharding"]) for m in messages}
    units = [make_unit(instance.profile, i, UnitChoice(kind)) for i, kind in sorted(kinds.items())]
    keys = ("what", "unit", "gate", "due")
    return Plan(
        units=tuple(units),
        messages=tuple(PlanMessage(block=0, **{key: m[key] for key in keys}) for m in messages),
        barrier=instance.barrier,
    )


def problem_of(instance: Instance) -> dict[str, Any]:
    """Return an instance as numbers, with times in quanta."""
    profile = instance.profile
    shapes = [make_unit(profile, i, UnitChoice(Sharding.ZERO3)) for i in range(len(profile.units))]
    bare = Plan(units=tuple(shapes), messages=(), barrier=instance.barrier)
    other = Footprints(profile).activations(bare)
    lengths_s = profile.slot_seconds([False] * len(shapes), barrier=instance.barrier)
    units = [_Options(instance, index).all() for index in range(len(shapes))]
    return {
        "lengths": [quanta(length_s) for length_s in lengths_s],
        "memory_limit": instance.memory_limit,
        "other": [num_bytes for num_bytes in other for _ in range(_MOMENTS)],
        "units": units,
        "most": _upper_bound_quanta(instance),
    }


def _upper_bound_quanta(instance: Instance) -> int:
    """Return the time of the best preset plan that fits; else an upper bound for any plan."""
    profile, footprints = instance.profile, Footprints(instance.profile)
    preset_options = PresetOptions(barrier=instance.barrier)
    plans = [preset_plan(name, profile.shapes, preset_options) for name in PLAN_PRESETS]
    plans.append(frugal_plan(profile, barrier=instance.barrier))
    feasible = [plan for plan in plans if footprints.peak(plan) <= instance.memory_limit]
    if feasible:
        return min(steady_quanta(plan, profile) for plan in feasible)
    return quanta(profile.compute_s + profile.update_s + profile.link_s(plans[-1]))


class _Options:
    """Computes the options of one unit."""

    def __init__(self, instance: Instance, unit: int) -> None:
        self._profile, self._barrier = instance.profile, instance.barrier
        self._slots, self._unit = Slots(len(instance.profile.units)), unit
        self._backward, self._forward = self._slots.backward(unit), self._slots.forward(unit)
        self._used_often = instance.profile.units[unit].used_often
        self._footprints = Footprints(instance.profile)

    def all(self) -> dict[str, list[dict[str, Any]]]:
        """Return the options by kind of message; those of one sharding are adjacent."""
        kinds = [kind for kind in Sharding if self._counts(kind)]
        split = [kind for kind in kinds if kind.shards_optimizer]
        return {
            "reduce": [option for kind in kinds for option in _loosest(self._reductions(kind))],
            "unshard": [option for kind in split for option in _loosest(self._unshards(kind))],
            "unshard_for_backward": [*self._unshards_for_backward()]
            if Sharding.ZERO3 in kinds
            else [],
        }

    def _counts(self, kind: Sharding) -> bool:
        """Return whether a sharding is allowed, and not worse than another in every respect."""
        if kind is not Sharding.ZERO1:
            return not (self._used_often and kind is Sharding.ZERO3)
        # ZERO1 has the messages of SDP, but always keeps gradients; SDP only for a while.
        other = self._held(Sharding.SDP)
        most = other.persistent + sum(other.gradients) + sum(other.reduced_gradients)
        return self._held(kind).persistent < most

    def _reductions(self, kind: Sharding) -> Iterator[dict[str, Any]]:
        slots, unit_memory = self._slots, self._held(kind)
        persistent = (0, _left(slots.count - 1), unit_memory.persistent)
        last = slots.update if self._barrier else self._forward
        first = 0 if self._used_often else self._backward
        for due in range(last, self._backward, -1):
            over = _runs(slots.update) if self._barrier else _entered(due)
            sent = over if unit_memory.updates_in_place else _entered(due)
            spans = [
                persistent,
                (_runs(first), sent, sum(unit_memory.gradients)),
                (_left(self._backward), over, sum(unit_memory.reduced_gradients)),
            ]
            yield self._option(
                MessageKind.REDUCE, kind, (self._backward, due), self._backward, spans
            )

    def _unshards(self, kind: Sharding) -> Iterator[dict[str, Any]]:
        slots, unit_memory, due = self._slots, self._held(kind), self._forward
        first = slots.update if self._barrier else self._backward + 1
        used = slots.count + self._backward if kind is Sharding.ZERO2 else due
        reduce_quanta = self._quanta(MessageKind.REDUCE, kind)
        for gate in range(first, due + 1):
            begins = max(_entered(gate), _left(slots.update)) if self._barrier else _entered(gate)
            spans = [(begins, _runs(used), unit_memory.unsharded)]
            if kind is Sharding.ZERO2:
                spans.append((_runs(due), _entered(used), -unit_memory.shard_overlap))
            after = max(gate - 1, slots.update) if self._barrier else gate - 1
            option = self._option(MessageKind.UNSHARD, kind, (gate, due), after, spans)
            yield option | {"reduced": reduce_quanta}

    def _unshards_for_backward(self) -> Iterator[dict[str, Any]]:
        used, kind = self._slots.count + self._backward, Sharding.ZERO3
        for gate in range(self._forward + 1, used + 1):
            slot = gate % self._slots.count
            spans = [(_entered(gate), _runs(used), self._held(kind).unsharded)]
            option = self._option(
                MessageKind.UNSHARD_FOR_BACKWARD, kind, (slot, self._backward), slot - 1, spans
            )
            yield option | {"ahead": gate < self._slots.count}

    def _option(
        self,
        what: MessageKind,
        kind: Sharding,
        window: tuple[int, int],
        after: int,
        spans: list[Span],
    ) -> dict[str, Any]:
        return {
            "sharding": str(kind),
            "gate": window[0],
            "due": window[1],
            "after": after,
            "ahead": False,
            "length": self._quanta(what, kind),
            "kept": self._bytes_by_moment(spans),
        }

    def _bytes_by_moment(self, spans: Sequence[Span]) -> list[int]:
        """Return the bytes at each moment of a cycle; spans may reach into the next cycle."""
        kept = [0] * (_MOMENTS * self._slots.count)
        for first, last, num_bytes in spans:
            for moment in range(first, last + 1):
                kept[moment % len(kept)] += num_bytes
        return kept

    def _held(self, kind: Sharding) -> UnitMemory:
        unit = make_unit(self._profile, self._unit, UnitChoice(kind))
        return self._footprints.of_unit(self._unit, unit, self._barrier)

    def _quanta(self, what: MessageKind, kind: Sharding) -> int:
        unit = make_unit(self._profile, self._unit, UnitChoice(kind))
        return quanta(self._profile.transfer_s(unit, what, unit.numel))


def _loosest(options: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the options whose memory differs from that of all wider ones, which come first."""
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
