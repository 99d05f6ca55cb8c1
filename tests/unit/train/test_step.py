"""One step's forward: what batch norm cannot learn from is said in our words, other errors stay."""

import pytest
from torch import nn

from stretto.cli.main import main
from stretto.cluster.world import Mesh, World
from stretto.comm.local import run_local
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
    """Fails in training by an error that has nothing to do with batch norm."""

    def forward(self, x):
        if self.training:
            raise ValueError("odd")
        return x


def flat(*more):
    layers = [nn.Linear(3 * 8 * 8, 16), nn.BatchNorm1d(16), *more, nn.Linear(16, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def odd():
    return flat(Odd())


def on_rank(channel, folder, *settings, first_step=0):
    loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={folder}", *settings])
    world = World(channel.rank, Mesh((channel.size,)))
    parts = assemble(loaded, prepare(loaded.config), world, channel, lambda event: None)
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


@pytest.mark.parametrize(("size", "first_step", "settings", "words"), CASES.values(), ids=CASES)
def test_one_sample_under_batch_norm_is_refused(size, first_step, settings, words, tmp_path):
    with pytest.raises(StrettoError) as caught:
        run_local(size, lambda c: on_rank(c, tmp_path, *settings, first_step=first_step))
    assert str(caught.value).startswith(words)


def test_other_errors_of_a_model_stay_what_they_are(tmp_path):
    with pytest.raises(ValueError, match="odd"):
        run_local(1, lambda channel: on_rank(channel, tmp_path, f"model.target={__name__}:odd"))


def test_the_command_ends_with_one_message(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("")
    assert main(["train", "run.toml", *SETTINGS]) == 1
    said = capsys.readouterr().err
    assert "stretto: step 5, rank 0: batch norm cannot learn from 1 sample" in said
    assert "Traceback" not in said
