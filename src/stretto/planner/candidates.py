"""Build and time candidate plans within a memory limit, and keep the fastest."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.planner.check import PlanError, check
from stretto.planner.message_windows import (
    MessageKey,
    WindowWidener,
    WindowWidth,
    fit_windows,
    order_by_urgency,
)
from stretto.planner.milp import FlowKind, MilpModel
from stretto.planner.plan import MessageKind, Plan
from stretto.planner.presets import PresetOptions, even_block_lengths, preset_plan
from stretto.planner.profile import Profile
from stretto.planner.timing import time_plan
from stretto.planner.unit_choices import (
    OptionAssigner,
    PlanConstraints,
    UnitChoice,
    UnitOption,
    make_option,
)

UNBOUNDED = 1 << 20
_WINDOW_WIDTHS = ((2, 1), (UNBOUNDED, UNBOUNDED), (1, 1), (4, 2), (1, 0), (8, 4), (2, 2))
"""Values of prefetch and reduce_slots to try, the most promising first."""
_PRESET_VARIANTS = [
    (name, prefetch, reduce_slots, barrier)
    for name in ("ddp", "dear", "zero2", "zero3")
    for prefetch in ((None,) if name in ("ddp", "dear") else (1, 2, None))
    for reduce_slots in (1, None)
    for barrier in (False, True)
]
_BLOCK_TIME_DIVISOR = 64
"""A block's link time is at most the computation time over this divisor, if latency allows it."""
_MAX_BLOCKS = 16
_ORDERED_MESSAGE_LIMIT = 500
"""Most messages to order for one set of options. Large models try fewer window widths."""
_MULTI_BLOCK_PENALTY = 1.01
"""Factor on the step time of a plan whose units are split into blocks, when plans are compared."""
_TIGHT_WINDOW_PENALTY = 1.03
"""Factor for a plan whose unshards have no slot to spare, where ranks are known to drift apart."""
_WIDENING_THRESHOLD = 1.03
"""A plan is tried with wider windows only if it takes less than this factor times the best."""


class CandidateSpec(NamedTuple):
    """The input from which a candidate plan is built."""

    name: str
    selected_options: tuple[UnitOption, ...]
    in_blocks: bool
    """Whether units are split into blocks."""
    window_width: WindowWidth


class Candidate(NamedTuple):
    """A plan with its simulated step time."""

    name: str
    plan: Plan
    step_s: float
    selected_options: tuple[UnitOption, ...]
    in_blocks: bool = False
    window_width: WindowWidth = WindowWidth(UNBOUNDED, UNBOUNDED)


def is_valid_plan(plan: Plan) -> bool:
    """Return whether a plan can be executed."""
    try:
        check(plan)
    except PlanError:
        return False
    return True


class Candidates:
    """Builds and times candidate plans for one profile and memory limit; keeps the best."""

    def __init__(
        self,
        profile: Profile,
        memory_limit: int,
        constraints: PlanConstraints,
        assigner: OptionAssigner,
    ) -> None:
        self.profile, self._memory_limit = profile, memory_limit
        self._constraints, self.assigner = constraints, assigner
        self._footprints = assigner.footprints
        self._best: Candidate | None = None

    @property
    def best(self) -> Candidate:
        """The best candidate so far; there must be one."""
        assert self._best is not None
        return self._best

    @property
    def best_step_s(self) -> float:
        """Step time of the best candidate; infinite if there is none."""
        return self._best.step_s if self._best is not None else float("inf")

    def try_presets(self) -> None:
        """Try the named presets (ddp, zero2, ...) that fit and that the constraints allow."""
        shapes, constraints = self.profile.shapes, self._constraints
        for name, prefetch, reduce_slots, barrier in _PRESET_VARIANTS:
            if constraints.barrier and not barrier:
                continue
            preset_options = PresetOptions(
                prefetch, reduce_slots, barrier=barrier, whole_layers=constraints.whole_layers
            )
            # A run without a barrier may still use the message order of a preset with one.
            plan = preset_plan(name, shapes, preset_options).replace(barrier=constraints.barrier)
            used = {unit.sharding for unit in plan.units}
            if used <= set(constraints.shardings) and self._fits(plan):
                self.replace_if_better(
                    Candidate(name, plan, self.step_s(plan), self._options_of(plan))
                )

    def _options_of(self, plan: Plan) -> tuple[UnitOption, ...]:
        return tuple(
            make_option(
                self.profile,
                index,
                UnitChoice(unit.sharding, unit.checkpoint, unit.in_host),
                self._footprints,
                barrier=plan.barrier,
            )
            for index, unit in enumerate(plan.units)
        )

    def _fits(self, plan: Plan) -> bool:
        return self._footprints.peak(plan) <= self._memory_limit

    def replace_if_better(self, candidate: Candidate) -> bool:
        """Replace the best candidate if ``candidate`` is better; return whether it was."""
        now = self._best
        better = now is None or self._penalized_step_s(candidate) < self._penalized_step_s(now) * (
            1 - 1e-9
        )
        if better:
            self._best = candidate
        return better

    def _penalized_step_s(self, candidate: Candidate) -> float:
        """Return a candidate's step time with penalties for small blocks and tight windows.

        Every message costs more than its link time, so a plan with many messages must be clearly
        faster. Where ranks are known to drift apart, a spare slot is worth a little time.
        """
        penalized_s = candidate.step_s
        if any(len(unit.blocks) > 1 for unit in candidate.plan.units):
            penalized_s *= _MULTI_BLOCK_PENALTY
        if self.profile.has_rank_skew and candidate.plan.has_tight_windows:
            penalized_s *= _TIGHT_WINDOW_PENALTY
        return penalized_s

    def try_options(
        self,
        name: str,
        selected_options: Sequence[UnitOption],
        milp_model: MilpModel | None = None,
        x: NDArray[np.float64] | None = None,
    ) -> None:
        """Try plans with these options: whole units and blocks, each with several window widths.

        Args:
            name: What to call the candidates.
            selected_options: One option for each unit.
            milp_model: If given with ``x``, windows are also taken from this solution.
            x: A solution of ``milp_model``.
        """
        block_lengths = {
            in_blocks: self._block_lengths(selected_options, in_blocks)
            for in_blocks in (False, True)
        }
        if block_lengths[False] == block_lengths[True] or not self._constraints.blocks:
            del block_lengths[True]
        for in_blocks, lengths in block_lengths.items():
            window_widths = [
                WindowWidth(prefetch, reduce_slots) for prefetch, reduce_slots in _WINDOW_WIDTHS
            ]
            if milp_model is not None and x is not None:
                window_widths.insert(
                    0, WindowWidth(UNBOUNDED, UNBOUNDED, _window_targets(milp_model, x, lengths))
                )
            num_messages = 3 * sum(map(len, lengths))
            for window_width in window_widths[: max(3, _ORDERED_MESSAGE_LIMIT // num_messages)]:
                self.attempt(CandidateSpec(name, tuple(selected_options), in_blocks, window_width))

    def attempt(self, spec: CandidateSpec) -> bool:
        """Build a plan from ``spec`` and time it; return whether it is the best now."""
        just_in_time = self.assigner.just_in_time_plan_of(
            spec.selected_options,
            self._block_lengths(spec.selected_options, spec.in_blocks),
        )
        plan = fit_windows(
            just_in_time.units,
            self._footprints,
            self._memory_limit,
            spec.window_width,
            just_in_time,
        )
        plan = order_by_urgency(plan, self.profile) if plan is not None else None
        if plan is None or not is_valid_plan(plan):
            return False
        step_s = self.step_s(plan)
        if step_s < _WIDENING_THRESHOLD * self.best_step_s:
            plan = self._with_widest_windows(plan)
            step_s = self.step_s(plan)
        return self.replace_if_better(Candidate(spec.name, plan, step_s, *spec[1:]))

    def step_s(self, plan: Plan) -> float:
        """Return the simulated step time of ``plan``."""
        return time_plan(plan, self.profile).step_s

    def _with_widest_windows(self, plan: Plan) -> Plan:
        """Return ``plan`` with every window as wide as memory allows; that never slows it down."""
        widener = WindowWidener(plan, self._footprints, self._memory_limit)
        widener.widen(WindowWidth(UNBOUNDED, UNBOUNDED))
        wide = widener.widened_plan()
        return wide if is_valid_plan(wide) else plan

    def _block_lengths(
        self, selected_options: Sequence[UnitOption], in_blocks: bool
    ) -> list[tuple[int, ...]]:
        profile = self.profile
        max_block_s = max(10 * profile.link.latency_s, profile.compute_s / _BLOCK_TIME_DIVISOR)
        block_lengths: list[tuple[int, ...]] = []
        for option, unit in zip(selected_options, profile.units, strict=True):
            most_s = max(option.reduce_s, option.unshard_s)
            num_blocks = (
                min(_MAX_BLOCKS, unit.numel, round(most_s / max_block_s)) if in_blocks else 1
            )
            block_lengths.append(
                even_block_lengths(unit.numel, -(-unit.numel // max(num_blocks, 1)))
            )
        return block_lengths


def _window_targets(
    milp_model: MilpModel, x: NDArray[np.float64], block_lengths: Sequence[Sequence[int]]
) -> dict[MessageKey, int]:
    """Return the gates and dues at which solution ``x`` starts unshards and ends reductions."""
    targets: dict[MessageKey, int] = {}
    for group, units in enumerate(milp_model.groups):
        for flow, what in (
            (FlowKind.UNSHARD, MessageKind.UNSHARD),
            (FlowKind.UNSHARD_FOR_BACKWARD, MessageKind.UNSHARD_FOR_BACKWARD),
        ):
            shares = milp_model.flow(x, flow, group)
            first = next((t for t, share in shares.items() if share > 0.01), None)
            if first is not None:
                slot = milp_model.first_slot(first)
                targets.update({(what, unit, 0): slot for unit in units})
        shares = milp_model.flow(x, FlowKind.REDUCE, group)
        for unit in units if shares else ():
            count = len(block_lengths[unit])
            for block in range(count):
                done = next(t for t, s in shares.items() if s >= (block + 1) / count - 1e-3)
                targets[MessageKind.REDUCE, unit, block] = milp_model.last_slot(done) + 1
    return targets
