"""A few real steps, so that a profile says what a run takes, not what its parts take alone.

Units that are timed one by one, and messages that have all cores to themselves, are quicker than in
a run: there ranks compute without a pause, and messages need cores, too. So six things are timed
in turn, as a run has them: steps without messages; zero2 with whole units and with blocks, and
zero3, all three with a barrier before the update; zero2 and ddp without one. The first stretches
the units' seconds; then the link's rate, the latency of a message and what a gather takes are those
with which the clock of plans says what the next three took. The fifth says what it costs that ranks
do not wait for each other: where they share cores, those that are ahead take them from the others.
The sixth says what a sum for all takes, whose update every rank makes whole.

In the end plans are made by that profile, with a barrier and without, and timed, too. A search
finds what is best by the clock, also where that is best only because the clock is wrong: what it
promises too much is known then.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from stretto.comm.spread import spread_text
from stretto.measure.interleave import Contender, interleave_steps
from stretto.plan.footprint import Footprints
from stretto.plan.planner import make_plan
from stretto.plan.presets import named_plan
from stretto.plan.profile import Profile
from stretto.plan.timing import time_plan
from stretto.plan.value import Plan
from stretto.strategy.sharded.config import ShardedConfig
from stretto.study.contenders import ALONE, Ours, Plain, Stage, alone

_WHOLE, _CUT, _AGAIN, _APART = "whole units", "in blocks", "gathered again", "without a barrier"
_FOR_ALL = "summed for all"
_PARTS = 4
"""Blocks of a unit, about."""
_HALVINGS = 12
_MOST_SLOWER = 4.0
_MOST_RATIO = 2.0
_MOST_LATENCY_S = 0.02


class Step(NamedTuple):
    """A plan, and what a step of it took."""

    plan: Plan
    step_s: float

    def is_longer(self, profile: Profile) -> bool:
        """Tell whether it took longer than the clock says."""
        return time_plan(self.plan, profile).step_s < self.step_s


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What steps took, with the plans that they followed."""

    alone_s: float
    whole: Step
    cut: Step
    again: Step
    apart: Step
    for_all: Step


def rehearse(
    stage: Stage, profile: Profile, sharded: ShardedConfig, runs: int, say: Callable[[str], None]
) -> Rehearsed:
    """Time the steps; all ranks together."""
    largest = max(unit.numel for unit in profile.units) * profile.kept_bytes
    base = sharded.model_copy(
        update={"plan": "zero2", "unit": profile.unit_bytes, "memory": None, "profile": None}
    )
    cut = base.model_copy(update={"block": max(1, largest // _PARTS)})
    again = base.model_copy(update={"plan": "zero3"})
    ours = {
        _WHOLE: Ours(stage, base, barrier=True),
        _CUT: Ours(stage, cut, barrier=True),
        _AGAIN: Ours(stage, again, barrier=True),
        _APART: Ours(stage, base),
        _FOR_ALL: Ours(stage, base.model_copy(update={"plan": "ddp"})),
    }
    plans = {name: one.plan for name, one in ours.items()}
    ready: dict[str, Contender] = {ALONE: Plain(stage, alone(stage)), **ours}
    seconds = _seconds(ready, stage, runs, say)
    steps = {name: Step(plan, seconds[name]) for name, plan in plans.items()}
    return Rehearsed(
        seconds[ALONE],
        steps[_WHOLE],
        steps[_CUT],
        again=steps[_AGAIN],
        apart=steps[_APART],
        for_all=steps[_FOR_ALL],
    )


def _seconds(
    ready: Mapping[str, Contender], stage: Stage, runs: int, say: Callable[[str], None]
) -> dict[str, float]:
    """Return what a step of each takes, interleaved; they are closed after it."""
    times = interleave_steps(ready, stage.channel, runs=runs, device=stage.device)
    for contender in ready.values():
        contender.close()
    seconds = {name: statistics.median(values) for name, values in times.items()}
    for name, step_s in seconds.items():
        say(f"a step, {name}: {step_s * 1e3:.1f} ms")
    return seconds


def fitted(profile: Profile, seen: Rehearsed) -> Profile:
    """Return the profile with which the clock says what was seen.

    A link and units that were quicker alone than they seem to be in a run are left.
    """
    longer = max(1.0, (seen.alone_s - profile.update_s) / max(profile.compute_s, 1e-12))
    units = tuple(unit.stretched(longer) for unit in profile.units)
    profile = _with_gathers(profile.model_copy(update={"units": units}), seen)
    parting = seen.apart.step_s / time_plan(seen.apart.plan, profile).step_s
    return _with_sums(profile.model_copy(update={"parting": parting}), seen)


def try_plans(
    stage: Stage, profile: Profile, sharded: ShardedConfig, runs: int, say: Callable[[str], None]
) -> list[Step]:
    """Time plans that are made by ``profile`` where all could stay; all ranks together."""
    budget = Footprints(profile).peak(named_plan("ddp", profile.shapes))
    alike = profile.stretched(1.0)  # with a barrier or without is asked for, not weighed
    plans: dict[str, Plan] = {}
    ready: dict[str, Contender] = {}
    for barrier in (False, True):
        name = f"by a plan of its own, {'with' if barrier else 'without'} a barrier"
        made = ""
        if stage.channel.rank == 0:
            made = make_plan(alike, budget, barrier=barrier).plan.to_json()
        plan = plans[name] = Plan.model_validate_json(spread_text(made, stage.channel))
        with TemporaryDirectory() as folder:
            file = Path(folder) / "plan.json"
            file.write_text(plan.to_json(), encoding="utf-8")
            update = {"plan": str(file), "unit": profile.unit_bytes, "memory": None}
            given = sharded.model_copy(update={**update, "profile": None})
            ready[name] = Ours(stage, given, barrier=plan.barrier)
    seconds = _seconds(ready, stage, runs, say)
    return [Step(plan, seconds[name]) for name, plan in plans.items()]


def corrected(profile: Profile, tried: Sequence[Step]) -> Profile:
    """Return the profile that says of plans that stray what those that were tried took."""
    found: dict[str, float] = {}
    for one in tried:
        if one.plan.strays:
            longer = max(1.0, one.step_s / time_plan(one.plan, profile).step_s)
            found["straying_met" if one.plan.barrier else "straying"] = longer
    return profile.model_copy(update=found)


def _with_sums(profile: Profile, seen: Rehearsed) -> Profile:
    """Return the profile whose sums for all take so long that ddp takes its time."""

    def with_ratio(ratio: float) -> Profile:
        return _with_link(profile, sum_ratio=ratio)

    return with_ratio(_ratio(lambda ratio: seen.for_all.is_longer(with_ratio(ratio))))


def _ratio(is_longer: Callable[[float], bool]) -> float:
    """Return where it was as long as told, between a half and twice; 1 if it was there."""
    longer = is_longer(1.0)
    near, far = 1.0, _MOST_RATIO if longer else 1 / _MOST_RATIO
    for _ in range(_HALVINGS):
        middle = (near + far) / 2
        if is_longer(middle) == longer:
            near = middle
        else:
            far = middle
    return near


def _with_gathers(profile: Profile, seen: Rehearsed) -> Profile:
    """Return the profile whose gathers are so much longer, or shorter, that zero3 takes its time.

    Their share of zero2's traffic is a half, of zero3's two thirds.
    """

    def with_ratio(ratio: float) -> Profile:
        return _with_latency(_with_link(profile, gather_ratio=ratio), seen)

    return with_ratio(_ratio(lambda ratio: seen.again.is_longer(with_ratio(ratio))))


def _with_latency(profile: Profile, seen: Rehearsed) -> Profile:
    """Return the profile whose messages begin so late that blocks take what they took."""
    low_s, high_s = profile.link.latency_s, _MOST_LATENCY_S
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        if seen.cut.is_longer(_with_rate(_with_link(profile, latency_s=middle_s), seen)):
            low_s = middle_s
        else:
            high_s = middle_s
    return _with_rate(_with_link(profile, latency_s=low_s), seen)


def _with_rate(profile: Profile, seen: Rehearsed) -> Profile:
    """Return the profile whose link is so much slower that whole units take what they took."""
    low, high = 1.0, _MOST_SLOWER
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        slower = _with_link(profile, bytes_per_s=profile.link.bytes_per_s / middle)
        if seen.whole.is_longer(slower):
            low = middle
        else:
            high = middle
    return _with_link(profile, bytes_per_s=profile.link.bytes_per_s / low)


def _with_link(profile: Profile, **changes: float) -> Profile:
    return profile.model_copy(update={"link": profile.link.model_copy(update=changes)})
