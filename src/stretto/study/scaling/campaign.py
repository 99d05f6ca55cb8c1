"""A whole study: runs that are still needed, several at a time, until none is."""

import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass

from stretto.errors import StrettoError
from stretto.launch.parent import end_with_parent
from stretto.run import flat_settings, prepare
from stretto.study.scaling.book import Book
from stretto.study.scaling.cells import Basis, run_cell
from stretto.study.scaling.sweep import Cell, Done, Point, Sweep
from stretto.virtual import check_virtual, find_device

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Study:
    """What is compared, and how."""

    basis: Basis
    points: tuple[Point, ...]
    sweep: Sweep

    def about(self) -> dict[str, object]:
        """Return what a book must have in common with this study to go on with it."""
        settings = flat_settings(self.basis.config(Cell(self.points[0], 1.0, 0)))
        free = ("strategy.", "run.", "train.batch")
        kept = {key: value for key, value in settings.items() if not key.startswith(free)}
        asked: dict[str, object] = {"--factors": list(self.sweep.factors)}
        if self.basis.lost:
            asked["--lost"] = self.basis.lost
        if self.basis.device != "cpu":  # it rounds otherwise
            asked["--device"] = self.basis.device
        # More seeds, and more points, may be asked for later.
        return kept | asked

    def check(self) -> None:
        """Find mistakes before the first run.

        Raises:
            ConfigError: Some point cannot be run, or the model cannot learn the data.
        """
        find_device(self.basis.device)
        for point in self.points:
            config = self.basis.config(Cell(point, 1.0, 0))
            check_virtual(config, point.workers, self.basis.lost_by(config.strategy))
        prepare(self.basis.config(Cell(self.points[0], 1.0, 0)))

    def wanted(self, done: Mapping[Cell, Done]) -> list[Cell]:
        """Return the runs that are needed next, of all points."""
        return [cell for point in self.points for cell in self.sweep.wanted(point, done)]


def carry_out(study: Study, book: Book, *, jobs: int, say: Say) -> None:
    """Run what is needed, ``jobs`` at a time, each in a process of its own; all is in the book.

    Interrupted, it loses no more than the runs under way.
    """
    context = multiprocessing.get_context("spawn")
    # A process whose study was killed would wait for its next run for ever.
    with ProcessPoolExecutor(jobs, context, initializer=end_with_parent) as pool:
        running: dict[Future[Done], Cell] = {}
        try:
            while wanted := study.wanted(book.done):
                new = [cell for cell in wanted if cell not in running.values()]
                for cell in new[: jobs - len(running)]:
                    running[pool.submit(run_cell, study.basis, cell)] = cell
                _finish_some(running, book, say)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _finish_some(running: dict["Future[Done]", Cell], book: Book, say: Say) -> None:
    over, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in over:
        cell = running.pop(future)
        try:
            done = future.result()
        except StrettoError as wrong:
            raise type(wrong)(f"{tell_cell(cell)}: {wrong}") from None
        book.write(cell, done)
        say(f"{tell_cell(cell)}: {tell_done(done)}  ({len(book.done)} runs done)")


def tell_cell(cell: Cell) -> str:
    """Return what a run is, for people."""
    point = cell.point
    return (
        f"{point.strategy}, {point.workers} workers, batch {point.batch}, rate x {cell.factor:g}, "
        f"seed {cell.seed}"
    )


def tell_done(done: Done) -> str:
    """Return what it came to."""
    if done.diverged:
        return f"diverged, {done.diverged}"
    return f"{done.accuracy:.2%} in {done.seconds:.0f} s ({done.samples_per_s:.0f} samples/s)"
