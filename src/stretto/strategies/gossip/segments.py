"""The order in which gossip updates and sends segments, which never depends on timing."""

from collections.abc import Callable, Sequence

from stretto.comm.transport import Work
from stretto.errors import StrettoError


class SegmentQueue:
    """Counts the gradients of segments and calls two functions for each segment, in a fixed order.

    ``sum_in_group`` is called once all gradients of the segment and of those before it have
    arrived; it starts the sum inside the rank's group. ``update_and_send`` is called once that sum
    has finished. Timing never changes the order of either.
    """

    def __init__(
        self,
        counts: Sequence[int],
        sum_in_group: Callable[[int], Work],
        update_and_send: Callable[[int], None],
    ) -> None:
        self._gradient_counts = counts
        self._sum_in_group, self._update_and_send = sum_in_group, update_and_send
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._missing = list(self._gradient_counts)
        self.started: list[Work] = []
        """Work of the segments that were started in this step, in order."""
        self._num_processed = 0

    def on_gradient(self, index: int) -> None:
        """Count a gradient of a segment and start complete segments; called by backward's hooks."""
        self._missing[index] -= 1
        if self._missing[index] < 0:
            raise StrettoError(
                f"segment {index} got a gradient after all of its gradients had arrived: backward "
                "ran again in the same step"
            )
        self._start_while(lambda: self._missing[len(self.started)] == 0)

    def process(self) -> None:
        """Process the segments whose work has finished, without waiting."""
        while self._num_processed < len(self.started) and _is_finished(
            self.started[self._num_processed]
        ):
            self._process_next()

    def start_rest(self) -> None:
        """Start all other segments; missing gradients belong to parameters that were not used."""
        self._start_while(lambda: True)

    def process_rest(self) -> None:
        """Process all started segments, even if they have to wait."""
        while self._num_processed < len(self.started):
            self._process_next()

    def _start_while(self, ready: Callable[[], bool]) -> None:
        while len(self.started) < len(self._missing) and ready():
            self.started.append(self._sum_in_group(len(self.started)))

    def _process_next(self) -> None:
        self._num_processed += 1
        self._update_and_send(self._num_processed - 1)


def _is_finished(work: Work) -> bool:
    return work.finished_s is not None
