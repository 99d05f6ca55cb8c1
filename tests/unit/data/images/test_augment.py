import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data.images.augment import Augment
from stretto.data.images.config import ImagesConfig
from tests.unit.data.images.pictures import PLAIN

MODES = ("none", "flip", "pad_crop", "crop")


def squares(count, side):
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def augment(mode="crop", *, train=True, **settings):
    return Augment(ImagesConfig(path="x", size=16, augment=mode, **PLAIN | settings), train=train)


def as_floats(pixels):
    return pixels.transpose(0, 3, 1, 2).astype(np.float32) * np.float32(1 / 255)


def windows(padded, size):
    return np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(0, 1))


@settings(deadline=None)
@given(
    mode=st.sampled_from(MODES),
    epoch=st.integers(0, 10**6),
    indices=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    seed=st.integers(-5, 5),
)
def test_a_sample_has_the_same_bits_in_every_batch(mode, epoch, indices, seed):
    transform, stored = augment(mode, seed=seed, store=20), squares(31, 20)
    picked = np.array(indices)
    together = transform(stored[picked], picked, epoch)
    single = [transform(stored[[i]], np.array([i]), epoch)[0] for i in indices]
    assert np.array_equal(together, np.stack(single))


@pytest.mark.parametrize("mode", ["flip", "pad_crop", "crop"])
@pytest.mark.parametrize("other", [{"epoch": 1}, {"seed": 1}], ids=["epoch", "seed"])
def test_another_epoch_or_seed_augments_samples_differently(mode, other):
    stored, indices = squares(16, 20), np.arange(16)
    first = augment(mode, store=20)(stored, indices, 0)
    second = augment(mode, store=20, seed=other.get("seed", 0))(
        stored, indices, other.get("epoch", 0)
    )
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_takes_the_centre_in_every_epoch(mode):
    stored = squares(5, 20)
    for epoch in range(3):
        shown = augment(mode, train=False, store=20)(stored, np.arange(5), epoch)
        assert np.array_equal(shown, as_floats(stored[:, 2:18, 2:18]))


def test_none_does_not_change_a_stored_square():
    stored = squares(5, 16)
    assert np.array_equal(augment("none")(stored, np.arange(5), 3), as_floats(stored))


def test_flip_mirrors_about_half_of_the_samples():
    stored = squares(400, 16)
    shown = augment("flip")(stored, np.arange(400), 0)
    same = (shown == as_floats(stored)).all(axis=(1, 2, 3))
    mirrored = (shown == as_floats(stored)[..., ::-1]).all(axis=(1, 2, 3))
    assert (same ^ mirrored).all()
    assert 150 < mirrored.sum() < 250


def test_crop_uses_every_window_of_the_stored_square():
    stored = np.repeat(squares(1, 18), 400, axis=0)
    shown = augment("crop", store=18)(stored, np.arange(400), 0)
    expected = windows(stored[0], 16).reshape(9, 3, 16, 16).astype(np.float32)
    both_ways = np.concatenate([expected, expected[..., ::-1]]) * np.float32(1 / 255)
    seen = [np.flatnonzero((both_ways == image).all(axis=(1, 2, 3))) for image in shown]
    assert {int(corner) for (corner,) in seen} == set(range(18))


def test_pad_crop_uses_windows_of_the_reflected_square():
    stored = np.repeat(squares(1, 16), 800, axis=0)
    shown = augment("pad_crop")(stored, np.arange(800), 0)
    padded = np.pad(stored[0], ((2, 2), (2, 2), (0, 0)), mode="reflect")
    expected = windows(padded, 16).reshape(25, 3, 16, 16).astype(np.float32)
    both_ways = np.concatenate([expected, expected[..., ::-1]]) * np.float32(1 / 255)
    seen = [np.flatnonzero((both_ways == image).all(axis=(1, 2, 3))) for image in shown]
    assert {int(corner) for (corner,) in seen} == set(range(50))


def test_each_colour_is_normalised():
    stored = squares(3, 16)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    shown = augment("none", mean=mean, std=std)(stored, np.arange(3), 0)
    for colour in range(3):
        exact = (stored[..., colour] / 255 - mean[colour]) / std[colour]
        assert shown[:, colour] == pytest.approx(exact, abs=1e-6)


def test_no_samples_give_an_array_of_length_zero():
    assert augment()(squares(0, 20), np.arange(0), 0).shape == (0, 3, 16, 16)
