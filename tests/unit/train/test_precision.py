"""The loss scale: halved by an overflow, doubled after 2,000 good steps, kept by a roll-back."""

import pytest

from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import thread_transports
from stretto.config import load
from stretto.errors import CheckpointError
from stretto.run import RunConfig, assemble, prepare
from stretto.train.precision import loss_scale
from stretto.train.state import resume_state, roll_back_, save_state


def test_the_scale_is_doubled_after_2000_good_steps_and_not_before():
    scale = loss_scale("fp16", 1024.0)
    for _ in range(1999):
        scale.update(is_finite=True)
    assert scale.value == 1024.0
    scale.update(is_finite=True)
    assert scale.value == 2048.0
    for _ in range(2000):
        scale.update(is_finite=True)
    assert scale.value == 4096.0


def test_an_overflow_halves_the_scale_and_the_count_begins_again():
    scale = loss_scale("fp16", 1024.0)
    for _ in range(1999):
        scale.update(is_finite=True)
    scale.update(is_finite=False)
    assert scale.value == 512.0
    for _ in range(1999):
        scale.update(is_finite=True)
    assert scale.value == 512.0
    scale.update(is_finite=True)
    assert scale.value == 1024.0


def test_the_scale_never_falls_below_one():
    scale = loss_scale("fp16", 2.0)
    for _ in range(5):
        scale.update(is_finite=False)
    assert scale.value == 1.0
    assert not scale.can_shrink


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_fp16_the_scale_is_one_for_ever(precision):
    scale = loss_scale(precision)
    scale.update(is_finite=False)
    assert (scale.value, scale.can_shrink, scale.state_dict()) == (1.0, False, {})


def test_a_scale_comes_back_from_its_state_with_its_count():
    scale, again = loss_scale("fp16", 64.0), loss_scale("fp16")
    for _ in range(1500):
        scale.update(is_finite=True)
    again.load_state_dict(scale.state_dict())
    for _ in range(500):
        again.update(is_finite=True)
    assert again.value == 128.0


@pytest.mark.parametrize(
    "state", [{"value": 0.5, "good_steps": 0}, {"value": 8.0, "good_steps": 1.5}, {"value": "x"}]
)
def test_a_damaged_state_is_refused(state):
    with pytest.raises(CheckpointError, match="loss scale is invalid"):
        loss_scale("fp16").load_state_dict(state)


def parts_in(folder):
    settings = ["data.samples=24", "data.test_samples=4", "data.size=8", "model.width=2"]
    settings += ["train.batch=12", "train.precision=fp16", "train.not_finite=rollback"]
    loaded = load(RunConfig, None, [*settings, f"run.folder={folder}"])
    (transport,) = thread_transports(1)
    return assemble(
        loaded, prepare(loaded.config), World(0, Mesh((1,))), transport, lambda event: None
    )


def test_rolling_back_keeps_the_scale_and_resuming_restores_it(tmp_path):
    parts = parts_in(tmp_path)
    parts.loss_scale.value = 512.0
    save_state(parts, 1)
    parts.loss_scale.update(is_finite=False)
    assert roll_back_(parts, log=pytest.fail) == 1
    assert parts.loss_scale.value == 256.0  # 512 would overflow again
    assert resume_state(parts, log=pytest.fail) == 1
    assert parts.loss_scale.value == 512.0
