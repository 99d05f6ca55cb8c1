"""A few real steps, so that a profile says what a run takes, not what its parts take alone.

Units that are timed one by one, and messages that have all cores to themselves, are quicker than in
a run: there ranks compute without a pause, and messages need cores, too. So three things are timed
in turn, as a run has them: steps without messages; steps of zero2 with whole units; and the same in
blocks. The first stretches the units' seconds; then the link's rate and the latency of a message
are those with which the clock of plans says what the other two took.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from stretto.measure.interleave import Contender, interleave_steps
from stretto.plan.profile import Profile
from stretto.plan.timing import time_plan
from stretto.plan.value import Plan
from stretto.strategy.sharded.config import ShardedConfig
from stretto.study.contenders import ALONE, Ours, Plain, Stage, alone

_WHOLE, _CUT = "whole units", "blocks"
_PARTS = 4
"""Blocks of a unit, about."""
_HALVINGS = 12
_MOST_SLOWER = 4.0
_MOST_LATENCY_S = 0.02


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What steps took, with the plans that they followed."""

    alone_s: float
    whole_s: float
    whole: Plan
    cut_s: float
    cut: Plan


def rehearse(
    stage: Stage, profile: Profile, sharded: ShardedConfig, runs: int, say: Callable[[str], None]
) -> Rehearsed:
    """Time the steps; all ranks together."""
    largest = max(unit.numel for unit in profile.units) * profile.kept_bytes
    base = sharded.model_copy(
        update={"plan": "zero2", "unit": profile.unit_bytes, "memory": None, "profile": None}
    )
    cut = base.model_copy(update={"block": max(1, largest // _PARTS)})
    ours = {_WHOLE: Ours(stage, base), _CUT: Ours(stage, cut)}
    plans = {name: one.plan for name, one in ours.items()}
    ready: dict[str, Contender] = {ALONE: Plain(stage, alone(stage)), **ours}
    times = interleave_steps(ready, stage.channel, runs=runs, device=stage.device)
    for contender in ready.values():
        contender.close()
    seconds = {name: statistics.median(values) for name, values in times.items()}
    for name, step_s in seconds.items():
        say(f"a step, {name}: {step_s * 1e3:.1f} ms")
    whole, parts = plans[_WHOLE], plans[_CUT]
    return Rehearsed(seconds[ALONE], seconds[_WHOLE], whole, seconds[_CUT], parts)


def fitted(profile: Profile, seen: Rehearsed) -> Profile:
    """Return the profile with which the clock says what was seen; what is quicker is left."""
    longer = max(1.0, (seen.alone_s - profile.update_s) / max(profile.compute_s, 1e-12))
    units = tuple(
        unit.model_copy(
            update={"forward_s": unit.forward_s * longer, "backward_s": unit.backward_s * longer}
        )
        for unit in profile.units
    )
    profile = profile.model_copy(update={"units": units})
    low_s, high_s = profile.link.latency_s, _MOST_LATENCY_S
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        tried = _with_rate(_with_link(profile, latency_s=middle_s), seen)
        if time_plan(seen.cut, tried).step_s < seen.cut_s:
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
        if time_plan(seen.whole, slower).step_s < seen.whole_s:
            low = middle
        else:
            high = middle
    return _with_link(profile, bytes_per_s=profile.link.bytes_per_s / low)


def _with_link(profile: Profile, **changes: float) -> Profile:
    return profile.model_copy(update={"link": profile.link.model_copy(update=changes)})
