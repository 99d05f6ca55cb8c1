"""Events to TensorBoard, in ``tensorboard/`` of the run's folder."""

from typing import TYPE_CHECKING

from stretto.telemetry.events import Event
from stretto.telemetry.trackers.opening import Opening
from stretto.telemetry.trackers.scalars import flat_words, scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Writes scalars as they come, each on its way to the disk before the next step.

    The file is opened at the first of them: what an earlier start wrote from that step on, and a
    resumed run does again, is marked as void there.
    """

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._writer: SummaryWriter | None = None

    def __call__(self, event: Event) -> None:
        """Write the scalars of ``event``."""
        found = scalars(event)
        if found is None:
            return
        if self._writer is None:
            self._writer = self._open(found.step)
        for name, value in found.values.items():
            self._writer.add_scalar(name, value, found.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, first_step: int) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        opening = self._opening
        folder = opening.run_dir / "tensorboard"
        writer = SummaryWriter(str(folder), purge_step=first_step if opening.resumed else None)
        # Not add_hparams: it would open a second run below this one for the same numbers.
        shown = dict.fromkeys(("end/loss", "end/accuracy"), 0.0)
        experiment, session, _ = hparams(flat_words(opening.settings), shown)
        for part in (experiment, session):
            writer._get_file_writer().add_summary(part)
        return writer
