"""Draws a plan's messages into the time-line of a run."""

import time
from collections.abc import Sequence

from stretto.plan.value import Plan, What
from stretto.strategy.sharded.dispatcher import Task
from stretto.strategy.sharded.storage import UnitStorage
from stretto.telemetry.timeline import Recorder, Span


class Drawing:
    """Told when a message begins, and when it has landed."""

    def __init__(self, plan: Plan, units: Sequence[UnitStorage], recorder: Recorder) -> None:
        self._plan, self._units, self._recorder = plan, units, recorder
        self._begun_s: dict[Task, float] = {}
        self._landed_s = 0.0
        self.step = 0
        """The step to which what lands belongs."""

    def begun(self, task: Task) -> None:
        """Note when it began; the next cycle's may begin before it lands."""
        self._begun_s[task] = time.monotonic()

    def landed(self, task: Task) -> None:
        """Draw it from its beginning, or the end of the one before."""
        what, unit, block = task.key
        ended_s = time.monotonic()
        started_s = min(max(self._begun_s.pop(task), self._landed_s), ended_s)
        self._landed_s = ended_s
        name = f"{what} {self._plan.units[unit].name}"
        num_bytes = self._num_bytes(what, unit, block)
        self._recorder.add(Span(name, "comm 0", started_s, ended_s, self.step, num_bytes))

    def _num_bytes(self, what: What, unit: int, block: int) -> int:
        storage = self._units[unit]
        if what is What.REDUCE:
            return storage.gradients[block].nbytes
        return storage.layout.blocks[block].numel * storage.flat.element_size()
