"""Batch norm on two real ranks: a run that is stopped, resumed or evaluated has the same bits."""

import subprocess
import sys

import pytest

from stretto.checkpoint import find_and_load
from stretto.comm.broadcast import as_bytes

pytestmark = [pytest.mark.multi, pytest.mark.timeout(200)]

RUN = """
[run]
threads = 1
trace = false
[data]
samples = 60
test_samples = 8
size = 8
[model]
kind = "resnet"
width = 4
[optim]
lr = 0.02
[train]
batch = 14
"""


def stretto_train(folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "train", "run.toml", "--workers", "2", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_resnet_run_evaluated_and_resumed_ends_with_the_same_checkpoint(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    stretto_train(tmp_path, "run.name=calm", "train.steps=6", "train.save_every=100")
    looked_at = ("run.name=cut", "train.statistics=reestimate", "train.eval_every=1")
    stretto_train(tmp_path, *looked_at, "train.steps=3", "train.save_every=1")
    stretto_train(tmp_path, *looked_at, "train.steps=6", "--resume")
    calm, cut = (
        find_and_load(tmp_path / "runs" / run, log=pytest.fail)[1] for run in ("calm", "cut")
    )
    assert calm.step == cut.step == 6
    assert calm.tensors_under("rank-1/buffers")
    different = [
        n for n in calm.tensors if as_bytes([calm.tensors[n]]).ne(as_bytes([cut.tensors[n]])).any()
    ]
    assert (different, cut.tensors.keys()) == ([], calm.tensors.keys())
