"""Train three steps of each fp16 recipe, unchanged, on four workers with two images each.

    python -m benchmarks.recipes [NAME ...]

CPUs compute fp16 many times as slowly as fp32, so the tests run these recipes in fp32; here a
ResNet-50 takes minutes. The learning rates are those of the full batch. The images are random. A
step that overflows is skipped and halves the loss scale, as it should. Such a run is resumed until
three steps have changed the model. Prints a JSON object per recipe. The exit status is 1 if a loss
was not finite, if a step was skipped for any other reason, or if fewer than three steps were made.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stretto.checkpoint import load_newest
from stretto.recipes import RECIPES, load_run
from stretto.telemetry.events import StepDone, StepSkipped
from stretto.telemetry.sinks import read_events
from tests.imagenet import write_imagenet

TAKEN = 3
"""Steps that must change the model."""
STEPS_AT_MOST = 16
WORKERS = 4
IMAGES_EACH = 2
DEADLINE_S = 3600
"""Timeout of each training process of a recipe."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One recipe and the results of its steps."""

    recipe: str
    rates: list[float]
    losses: list[float | None]
    """None for a skipped step."""
    left_out: list[str]
    """The reason of each skipped step."""
    loss_scale: float
    """After the last step."""
    step_s: list[float]
    valid: bool
    """Whether each step had a finite loss, or was skipped because of the loss scale."""

    @property
    def missing(self) -> int:
        """Steps that are still to be made."""
        return max(0, TAKEN - sum(loss is not None for loss in self.losses))

    @property
    def passed(self) -> bool:
        """Whether the recipe has trained."""
        return self.valid and not self.missing


def main() -> int:
    """Try the recipes; print one JSON object each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=in_fp16())
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="stretto-recipes-") as folder:
        images = write_imagenet(Path(folder) / "imagenet")
        for number, name in enumerate(args.names, 1):
            print(f"{number} of {len(args.names)}: {name}", flush=True)
            tried = try_recipe(name, images, Path(folder) / "runs")
            failed += not tried.passed
            print(json.dumps(as_row(tried)), flush=True)
    print(f"{len(args.names) - failed} passed, {failed} failed")
    return 1 if failed else 0


def as_row(tried: Tried) -> dict[str, object]:
    """Return a result as JSON values, under the keys of older records."""
    return {{"valid": "sound"}.get(key, key): value for key, value in asdict(tried).items()}


def in_fp16() -> list[str]:
    """Return the recipes that compute in fp16."""
    return [name for name in RECIPES if load_run(Path(name)).config.train.precision == "fp16"]


def try_recipe(name: str, images: Path, runs: Path) -> Tried:
    """Train a few steps of a recipe with the rates of its own batch."""
    batch = load_run(Path(name)).config.train.batch
    settings = [f"data.path={images}", f"run.folder={runs}", f"optim.for_batch={batch}"]
    settings += [f"train.batch={WORKERS * IMAGES_EACH}"]
    settings += ["train.log_every=1", "run.threads=1", "data.decoders=1", "run.trace=false"]
    command = [sys.executable, "-m", "stretto", "train", name, "--workers", str(WORKERS)]
    steps, tried = TAKEN, None
    while tried is None or (tried.missing and steps + tried.missing <= STEPS_AT_MOST):
        steps += tried.missing if tried else 0
        on = ["--resume"] if tried else []
        length = f"train.steps={steps}"
        subprocess.run([*command, *on, *settings, length], check=True, timeout=DEADLINE_S)
        tried = read_results(name, runs / name)
    return tried


def read_results(name: str, run_dir: Path) -> Tried:
    """Read a run's steps from its events, and the loss scale from its last checkpoint."""
    events = read_events(run_dir / "events.jsonl")
    done = [event for event in events if isinstance(event, StepDone)]
    left_out = {event.step: event.reason for event in events if isinstance(event, StepSkipped)}
    state = load_newest(run_dir / "checkpoints", log=print)
    scale = state.facts["loss_scale"]["value"] if state else math.nan
    return Tried(
        recipe=name,
        rates=[event.lr for event in done],
        losses=[None if event.step in left_out else event.loss for event in done],
        left_out=list(left_out.values()),
        loss_scale=scale,
        step_s=[round(event.step_s, 2) for event in done],
        valid=all_steps_valid(done, left_out) and math.isfinite(scale),
    )


def all_steps_valid(done: Sequence[StepDone], left_out: dict[int, str]) -> bool:
    """Return whether every step was reported, with a finite loss or an overflow of the scale."""
    is_complete = [event.step for event in done] == list(range(1, len(done) + 1))
    return is_complete and all(
        left_out[event.step].startswith("overflow at a loss scale")
        if event.step in left_out
        else math.isfinite(event.loss)
        for event in done
    )


if __name__ == "__main__":
    sys.exit(main())
