"""Runs a campaign of faults: seeded trials, a JSON object per trial, and the count."""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Protocol


class Trial(Protocol):
    """One fault and its result: a dataclass that knows whether the trial passed."""

    @property
    def passed(self) -> bool:
        """Whether everything was as it should be."""
        ...


def run_campaign(campaign: Callable[[int, int], Iterator[Trial]], about: str | None) -> int:
    """Read ``--count`` and ``--seed``, run the trials and print them; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    args = parser.parse_args()
    failed = 0
    for trial in campaign(args.count, args.seed):
        failed += not trial.passed
        print(json.dumps(asdict(trial)), flush=True)  # type: ignore[call-overload]
    print(f"{args.count - failed} passed, {failed} failed")
    return 1 if failed else 0
