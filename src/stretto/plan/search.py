"""The best plan changed bit by bit: its order, its options, whose windows come first."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

from stretto.plan.candidates import Attempt, Candidate, Candidates, is_sound
from stretto.plan.fitting import Key, Reach
from stretto.plan.options import Option
from stretto.plan.timing import Timed, time_plan
from stretto.plan.value import Plan, What

_EFFORT = 5000
"""Messages that may be looked at: fewer changes are tried of a model with many units."""
_FAR = 12
"""Places by which a message may be moved at once."""
_FEW = 7
"""Units, of no more of which two options are changed at once."""
_NARROW = (Reach(2, 1), Reach(1, 1))
_WORTH = 1e-4
"""Shorter by less is not worth another round."""


def improve(candidates: Candidates) -> None:
    """Change the best candidate as long as that helps, and effort is left."""
    search = _Search(candidates)
    while True:
        before_s = candidates.best_s
        search.reorder()
        search.favour()
        search.choose_otherwise(1)
        if len(candidates.best.chosen) <= _FEW:
            search.choose_otherwise(2)
        search.reorder()
        if search.is_tired or candidates.best_s > before_s * (1 - _WORTH):
            return


class _Search:
    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._left = _EFFORT

    @property
    def is_tired(self) -> bool:
        """Whether no effort is left."""
        return self._left <= 0

    def _spend(self, plan: Plan, times: float = 1.0) -> bool:
        """Take the effort of looking at ``plan``; say whether there was some left."""
        had = self._left > 0
        self._left -= int(times * len(plan.messages))
        return had

    def reorder(self) -> None:
        """Let messages that somebody waits for go earlier, as long as that helps."""
        candidates = self._candidates
        found = True
        while found:
            found = False
            now = candidates.best
            for plan in _reordered(now.plan, time_plan(now.plan, candidates.profile)):
                if not self._spend(plan, 0.2):
                    return
                if is_sound(plan):
                    step_s = candidates.step_s(plan)
                    found = candidates.offer(now._replace(plan=plan, step_s=step_s)) or found
                if found:
                    break

    def favour(self) -> None:
        """Give room first to messages that somebody waits for."""
        candidates = self._candidates
        for key in _waited_for(candidates.best.plan, candidates):
            now = candidates.best
            if not self._spend(now.plan):
                return
            first = (key, *(other for other in now.reach.first if other != key))
            self._attempt(now, now.chosen, replace(now.reach, first=first))

    def choose_otherwise(self, count: int) -> None:
        """Give ``count`` units other options, wherever that helps."""
        options = self._candidates.choosing.options
        for units in combinations(range(len(options)), count):
            for changed in product(*(options[unit] for unit in units)):
                now = self._candidates.best
                if any(now.chosen[u] == o for u, o in zip(units, changed, strict=True)):
                    continue
                chosen = list(now.chosen)
                for unit, option in zip(units, changed, strict=True):
                    chosen[unit] = option
                for reach in (now.reach, *_NARROW) if self._may_be_faster(chosen) else ():
                    if not self._spend(now.plan):
                        return
                    self._attempt(now, tuple(chosen), reach)

    def _may_be_faster(self, chosen: list[Option]) -> bool:
        """Say whether the link has time enough for all messages in a shorter step."""
        carried_s = sum(option.channel_s for option in chosen)
        computed_s = self._candidates.profile.compute_s + sum(o.again_s for o in chosen)
        return max(carried_s, computed_s) < self._candidates.best_s

    def _attempt(self, now: Candidate, chosen: tuple[Option, ...], reach: Reach) -> bool:
        return self._candidates.attempt(Attempt(now.name, chosen, now.fine, reach))


def _waits(plan: Plan, timed: Timed) -> Iterator[int]:
    """Yield the slots that wait, longest first."""
    before = [timed.slots[-1].end_s - timed.step_s, *(slot.end_s for slot in timed.slots)]
    waited = [
        (slot.start_s - end_s, i)
        for i, (slot, end_s) in enumerate(zip(timed.slots, before, strict=False))
    ]
    yield from (i for wait_s, i in sorted(waited, reverse=True) if wait_s > _WORTH * timed.step_s)


def _reordered(plan: Plan, timed: Timed) -> Iterator[Plan]:
    """Yield plans in which a message that somebody waits for goes earlier.

    Or whatever stands just before it, later.
    """
    for slot in _waits(plan, timed):
        for place, message in enumerate(plan.messages):
            if message.due != slot:
                continue
            for far in range(1, min(_FAR, place) + 1):
                yield _moved(plan, place, place - far)
                yield _moved(plan, place - far, place)


def _moved(plan: Plan, place: int, to: int) -> Plan:
    messages = list(plan.messages)
    messages.insert(to, messages.pop(place))
    return plan.replace(messages=tuple(messages))


def _waited_for(plan: Plan, candidates: Candidates) -> list[Key]:
    """Return the gathers that slots wait for, and that would have gone earlier had they room."""
    timed = time_plan(plan, candidates.profile)
    found: list[Key] = []
    for slot in _waits(plan, timed):
        for message in plan.messages:
            if message.due == slot and message.what is not What.REDUCE:
                found.append((message.what, message.unit, 0))
    return list(dict.fromkeys(found))
