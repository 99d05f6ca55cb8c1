"""Local search from the best plan: change message order, unit options and window priorities."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

from stretto.planner.candidates import Candidate, Candidates, CandidateSpec, is_valid_plan
from stretto.planner.message_windows import MessageKey, WindowWidth
from stretto.planner.plan import MessageKind, Plan
from stretto.planner.timing import StepTiming, time_plan
from stretto.planner.unit_choices import UnitOption

_SEARCH_MESSAGE_LIMIT = 5000
"""Limit of the search effort, in messages of the plans that are tried."""
_MAX_MOVE = 12
"""Most positions by which one change moves a message."""
_MAX_UNITS_FOR_PAIRS = 7
"""Models with more units change the option of one unit at a time, never of two."""
_NARROW_WIDTHS = (WindowWidth(2, 1), WindowWidth(1, 1))
_MIN_GAIN = 1e-4
"""Relative gain below which another round of the search is not worth it."""


def improve_best_plan(candidates: Candidates) -> None:
    """Improve the best candidate until a round gains too little or the effort is spent."""
    search = _LocalSearch(candidates)
    while True:
        before_s = candidates.best_step_s
        search.reorder()
        search.widen_waiting_first()
        search.try_other_options(1)
        if len(candidates.best.selected_options) <= _MAX_UNITS_FOR_PAIRS:
            search.try_other_options(2)
        search.reorder()
        if search.is_exhausted or candidates.best_step_s > before_s * (1 - _MIN_GAIN):
            return


class _LocalSearch:
    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._effort_left = _SEARCH_MESSAGE_LIMIT

    @property
    def is_exhausted(self) -> bool:
        """Whether the effort is spent."""
        return self._effort_left <= 0

    def _spend_effort(self, plan: Plan, times: float = 1.0) -> bool:
        """Charge the effort of trying ``plan``; return whether any effort was left before."""
        had_effort = self._effort_left > 0
        self._effort_left -= int(times * len(plan.messages))
        return had_effort

    def reorder(self) -> None:
        """Move messages that computation waits for to earlier positions, as long as that helps."""
        candidates = self._candidates
        found = True
        while found:
            found = False
            best = candidates.best
            for plan in _reordered_plans(best.plan, time_plan(best.plan, candidates.profile)):
                if not self._spend_effort(plan, 0.2):
                    return
                if is_valid_plan(plan):
                    step_s = candidates.step_s(plan)
                    found = (
                        candidates.replace_if_better(best._replace(plan=plan, step_s=step_s))
                        or found
                    )
                if found:
                    break

    def widen_waiting_first(self) -> None:
        """Widen the windows of messages that computation waits for before all others."""
        candidates = self._candidates
        for key in _blocking_unshards(candidates.best.plan, candidates):
            best = candidates.best
            if not self._spend_effort(best.plan):
                return
            first = (key, *(other for other in best.window_width.first if other != key))
            self._attempt(best, best.selected_options, replace(best.window_width, first=first))

    def try_other_options(self, count: int) -> None:
        """Try other options for every combination of ``count`` units; keep what helps."""
        options = self._candidates.assigner.options
        for units in combinations(range(len(options)), count):
            for changed in product(*(options[unit] for unit in units)):
                best = self._candidates.best
                if any(best.selected_options[u] == o for u, o in zip(units, changed, strict=True)):
                    continue
                selected_options = list(best.selected_options)
                for unit, option in zip(units, changed, strict=True):
                    selected_options[unit] = option
                for window_width in (
                    (best.window_width, *_NARROW_WIDTHS)
                    if self._may_be_faster(selected_options)
                    else ()
                ):
                    if not self._spend_effort(best.plan):
                        return
                    self._attempt(best, tuple(selected_options), window_width)

    def _may_be_faster(self, selected_options: list[UnitOption]) -> bool:
        """Return whether link time and compute time both allow a shorter step."""
        transfer_s = sum(option.link_s for option in selected_options)
        computed_s = self._candidates.profile.compute_s + sum(
            o.recompute_s for o in selected_options
        )
        return max(transfer_s, computed_s) < self._candidates.best_step_s

    def _attempt(
        self, best: Candidate, selected_options: tuple[UnitOption, ...], window_width: WindowWidth
    ) -> bool:
        return self._candidates.attempt(
            CandidateSpec(best.name, selected_options, best.in_blocks, window_width)
        )


def _waiting_slots(plan: Plan, timed: StepTiming) -> Iterator[int]:
    """Yield the slots that wait for messages, the longest wait first."""
    before = [timed.slots[-1].end_s - timed.step_s, *(slot.end_s for slot in timed.slots)]
    waited = [
        (slot.start_s - end_s, i)
        for i, (slot, end_s) in enumerate(zip(timed.slots, before, strict=False))
    ]
    yield from (
        i for wait_s, i in sorted(waited, reverse=True) if wait_s > _MIN_GAIN * timed.step_s
    )


def _reordered_plans(plan: Plan, timed: StepTiming) -> Iterator[Plan]:
    """Yield plans that move a message that a slot waits for earlier, or one before it later."""
    for slot in _waiting_slots(plan, timed):
        for position, message in enumerate(plan.messages):
            if message.due != slot:
                continue
            for distance in range(1, min(_MAX_MOVE, position) + 1):
                yield _with_message_moved(plan, position, position - distance)
                yield _with_message_moved(plan, position - distance, position)


def _with_message_moved(plan: Plan, position: int, to: int) -> Plan:
    messages = list(plan.messages)
    messages.insert(to, messages.pop(position))
    return plan.replace(messages=tuple(messages))


def _blocking_unshards(plan: Plan, candidates: Candidates) -> list[MessageKey]:
    """Return the unshards that slots wait for, without duplicates."""
    timed = time_plan(plan, candidates.profile)
    found: list[MessageKey] = []
    for slot in _waiting_slots(plan, timed):
        for message in plan.messages:
            if message.due == slot and message.what is not MessageKind.REDUCE:
                found.append((message.what, message.unit, 0))
    return list(dict.fromkeys(found))
