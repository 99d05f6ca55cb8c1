"""What reading the data took, over all ranks: decoded, cached, skipped and why."""

import json

import torch

from stretto.comm.small import add_up_, gather_text
from stretto.errors import StrettoError
from stretto.telemetry.events import DataRead
from stretto.train.parts import Parts


class Reading:
    """Adds up accounts once an epoch; names each bad sample once, however often it is met."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        for source in (parts.source, parts.test_source):
            source.take_account()  # a trial of the model has read something before
        self._named: set[str] = set()

    def account(self, done: int) -> DataRead | None:
        """Return what happened since the last call; None where nothing had to be read at all.

        All ranks call this together, and raise together when too much was lost.
        """
        parts = self._parts
        mine = [source.take_account() for source in (parts.source, parts.test_source)]
        bad = [f"{each.sample}: {each.reason}" for one in mine for each in one.skipped]
        sums = torch.tensor(
            [sum(a.decoded for a in mine), sum(a.cached for a in mine), len(bad)],
            dtype=torch.float64,
        )
        add_up_(sums, parts.channel)
        decoded, cached, skipped = (int(value) for value in sums.tolist())
        if not decoded + cached + skipped:
            return None
        files = self._news(bad) if skipped else []
        self._check_limit(skipped, decoded + cached + skipped, files)
        return DataRead(done, (done - 1) // parts.epoch_steps, decoded, cached, skipped, files)

    def _news(self, bad: list[str]) -> list[str]:
        told = gather_text(json.dumps(bad), self._parts.channel)
        news = sorted({line for text in told for line in json.loads(text)} - self._named)
        self._named.update(news)
        return news

    def _check_limit(self, skipped: int, asked: int, files: list[str]) -> None:
        limit = self._parts.source.bad_limit
        if skipped > limit * asked:
            example = f", such as {files[0]}" if files else ""
            raise StrettoError(
                f"{skipped:,} of {asked:,} samples could not be read{example}: more than "
                f"data.bad_limit = {limit:g} of them; mend the data, or raise the limit"
            )
