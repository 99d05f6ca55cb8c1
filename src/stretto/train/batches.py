"""The batches of a run, and a report of what reading them took (decoded, cached, skipped)."""

import json
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import torch

from stretto.comm.transport import all_gather_text, all_reduce_small_
from stretto.data.loader import LoadedSamples, Prefetcher
from stretto.errors import StrettoError
from stretto.telemetry.events import DataRead
from stretto.train.run_parts import RunParts
from stretto.train.step import iterate_rank_samples


class StepBatches:
    """Iterates over (step, this rank's loaded samples); can go back to an earlier step."""

    def __init__(self, parts: RunParts, first_step: int) -> None:
        self._parts = parts
        self._next = first_step
        self._batches: Prefetcher | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._batches is not None:
            self._batches.close()

    def __iter__(self) -> Iterator[tuple[int, LoadedSamples]]:
        while self._next < self._parts.total_steps:
            first, self._next = self._next, self._parts.total_steps
            with Prefetcher(
                self._parts.source, iterate_rank_samples(self._parts, first)
            ) as self._batches:
                for step, batch in enumerate(self._batches, first):
                    yield step, batch
                    if self._next < self._parts.total_steps:  # rolled back
                        break

    def roll_back(self, step: int) -> None:
        """Continue the iteration with ``step``."""
        self._next = step


class ReadReporter:
    """Sums the read statistics of all ranks; reports each unreadable sample only once."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        for source in (parts.source, parts.test_source):
            source.take_statistics()  # drop the samples read by a trial of the model
        self._reported: set[str] = set()

    def summarize(self, steps_done: int) -> DataRead | None:
        """Return the statistics since the last call; None if no sample was read.

        All ranks call this together. If too many samples were unreadable, it raises on all of them.

        Raises:
            StrettoError: More than ``data.max_corrupt_files`` of the samples were unreadable.
        """
        parts = self._parts
        statistics = [source.take_statistics() for source in (parts.source, parts.test_source)]
        bad = [f"{each.sample}: {each.reason}" for one in statistics for each in one.skipped]
        sums = torch.tensor(
            [sum(a.decoded for a in statistics), sum(a.cached for a in statistics), len(bad)],
            dtype=torch.float64,
        )
        all_reduce_small_(sums, parts.transport)
        decoded, cached, skipped = (int(value) for value in sums.tolist())
        if not decoded + cached + skipped:
            return None
        files = self._new_bad_samples(bad) if skipped else []
        self._check_limit(skipped, decoded + cached + skipped, files)
        return DataRead(
            steps_done, (steps_done - 1) // parts.epoch_steps, decoded, cached, skipped, files
        )

    def _new_bad_samples(self, bad: list[str]) -> list[str]:
        texts = all_gather_text(json.dumps(bad), self._parts.transport)
        new_bad_samples = sorted(
            {line for text in texts for line in json.loads(text)} - self._reported
        )
        self._reported.update(new_bad_samples)
        return new_bad_samples

    def _check_limit(self, skipped: int, num_requested: int, files: list[str]) -> None:
        limit = self._parts.source.max_corrupt_files
        if skipped > limit * num_requested:
            example = f", such as {files[0]}" if files else ""
            raise StrettoError(
                f"{skipped:,} of {num_requested:,} samples could not be read{example}: more than "
                f"data.max_corrupt_files = {limit:g} of them; mend the data, or raise the limit"
            )
