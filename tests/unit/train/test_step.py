"""Forward of a step: a clear error for batches too small for batch norm; other errors unchanged."""

import pytest
from torch import nn

from stretto.cli.main import main
from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.errors import StrettoError
from stretto.run import RunConfig, assemble, prepare
from stretto.train.loop import train

SETTINGS = [
    "data.samples=49",
    "data.test_samples=8",
    "data.size=8",
    "train.batch=12",
    "model.kind=custom",
    f"model.target={__name__}:flat",
]


class Odd(nn.Module):
    """Fails in training with an error unrelated to batch norm."""

    def forward(self, x):
        if self.training:
            raise ValueError("odd")
        return x


def flat(*more):
    layers = [nn.Linear(3 * 8 * 8, 16), nn.BatchNorm1d(16), *more, nn.Linear(16, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def odd():
    return flat(Odd())


def on_rank(transport, folder, *settings, first_step=0):
    loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={folder}", *settings])
    world = World(transport.rank, Mesh((transport.size,)))
    parts = assemble(loaded, prepare(loaded.config), world, transport, lambda event: None)
    try:
        train(parts, first_step)
    finally:
        parts.strategy.close()


CASES = {
    "a last step of one sample": (
        2,
        0,
        [],
        "step 5, rank 0: batch norm cannot learn from 1 sample at a time: one value has no "
        "variance. The last step of a pass has 1 of 12 samples, for 2 workers: drop them",
    ),
    "a last step that gives one rank a sample more": (
        2,
        0,
        ["data.samples=51"],
        "step 5, rank 1: batch norm cannot learn from 1 sample at a time: one value has no "
        "variance. The last step of a pass has 3 of 12 samples, for 2 workers: drop them",
    ),
    "the last step of a second pass": (
        1,
        9,
        ["train.epochs=2"],
        "step 10, rank 0: batch norm cannot learn from 1 sample at a time: one value has no "
        "variance. The last step of a pass has 1 of 12 samples, for 1 worker: drop them",
    ),
    "micro-batches of one, in the last step too": (
        1,
        3,
        ["train.micro_batch=1", "data.samples=48"],
        "step 4, rank 0: batch norm cannot learn from 1 sample at a time: one value has no "
        "variance. Every step has 12 samples, for 1 worker: take a larger train.batch, larger",
    ),
}


@pytest.mark.parametrize(("size", "first_step", "settings", "message"), CASES.values(), ids=CASES)
def test_a_single_sample_with_batch_norm_is_refused(size, first_step, settings, message, tmp_path):
    with pytest.raises(StrettoError) as caught:
        run_threads(size, lambda c: on_rank(c, tmp_path, *settings, first_step=first_step))
    assert str(caught.value).startswith(message)


def test_other_errors_of_a_model_are_unchanged(tmp_path):
    with pytest.raises(ValueError, match="odd"):
        run_threads(
            1, lambda transport: on_rank(transport, tmp_path, f"model.target={__name__}:odd")
        )


def test_the_command_ends_with_one_message(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("")
    assert main(["train", "run.toml", *SETTINGS]) == 1
    said = capsys.readouterr().err
    assert "stretto: step 5, rank 0: batch norm cannot learn from 1 sample" in said
    assert "Traceback" not in said
