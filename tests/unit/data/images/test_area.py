import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from stretto.data.images.augment import MAX_TRIES, Augment, draw_boxes, exact_power
from stretto.data.images.config import Form, ImagesConfig, image_sizes, write_row
from stretto.data.images.decoder import EXTENT
from tests.unit.data.images.pictures import PLAIN, noise

SIZE = 16


def augment(**settings):
    settings = {"size": SIZE, "augment": "area_crop"} | PLAIN | settings
    return Augment(ImagesConfig(path="x", **settings), train=True)


def rows(*images, side=30):
    stored = np.empty((len(images), *Form(side, is_whole=True).shape), dtype=np.uint8)
    for row, image in zip(stored, images, strict=True):
        write_row(row, EXTENT.pack(*image.size) + image.tobytes())
    return stored


def boxes(count, width, height, *, area=(0.08, 1.0), aspect=(3 / 4, 4 / 3), seed=0):
    """Return width, height, left and top of crops of ``count`` images of one size."""
    draws = np.random.default_rng(seed).random((count, 2 + 2 * MAX_TRIES))
    drawn = draw_boxes(draws, np.tile([width, height], (count, 1)), area, aspect)
    left, top, right, bottom = drawn.T
    return right - left, bottom - top, left, top


@settings(deadline=None)
@given(
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    area=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(sorted),
    aspect=st.tuples(st.floats(0.2, 5), st.floats(0.2, 5)).map(sorted),
)
def test_a_crop_is_inside_the_image_and_within_the_bounds_or_is_the_largest_at_the_centre(
    width, height, area, aspect
):
    w, h, left, top = boxes(50, width, height, area=area, aspect=aspect)
    assert ((left >= 0) & (left + w <= width) & (top >= 0) & (top + h <= height)).all()
    assert (w > 0).all()
    assert (h > 0).all()
    near = 1 + 1e-9
    assert ((w / h >= aspect[0] / near) & (w / h <= aspect[1] * near)).all()
    share = w * h / (width * height)
    allowed = (share >= area[0] / near) & (share <= area[1] * near)
    touches = np.isclose(w, width) | np.isclose(h, height)
    central = np.isclose(left, (width - w) / 2) & np.isclose(top, (height - h) / 2)
    assert (allowed | (touches & central)).all()


def test_areas_and_positions_are_uniform_and_aspects_log_uniform():
    w, h, left, top = boxes(20_000, 400, 400, area=(0.1, 0.5))  # any of these fits
    uniform = {
        "area": (w * h / 400**2 - 0.1) / 0.4,
        "aspect": np.log(w / h * 4 / 3) / np.log(16 / 9),
        "left": left / (400 - w),
        "top": top / (400 - h),
    }
    for values in uniform.values():
        shares = np.histogram(values, bins=10, range=(0, 1))[0] / len(values)
        assert shares == pytest.approx(np.full(10, 0.1), abs=0.01)
    assert np.corrcoef(list(uniform.values())) == pytest.approx(np.eye(4), abs=0.03)


@pytest.mark.parametrize(("width", "height"), [(1000, 100), (100, 1000)])
def test_if_no_try_fits_the_largest_crop_at_the_centre_is_used(width, height):
    w, h, left, top = boxes(20, width, height, area=(0.9, 1.0))
    long = 100 * 4 / 3
    assert np.maximum(w, h) == pytest.approx(np.full(20, long))
    assert np.maximum(left, top) == pytest.approx(np.full(20, (1000 - long) / 2))


def test_exact_powers_equal_powers():
    exponents = np.linspace(0, 1, 1001)[:-1]
    for base in (1.0, 16 / 9, 100.0):
        assert exact_power(base, exponents) == pytest.approx(base**exponents, rel=1e-6)


@settings(deadline=None, max_examples=30)
@given(epoch=st.integers(0, 10**6), indices=st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_a_sample_has_the_same_bits_in_every_batch(epoch, indices):
    images = [noise(30, 30), noise(29, 17), noise(8, 31), noise(1, 1)]
    transform, stored, picked = augment(), rows(*images), np.array(indices)
    together = transform(stored[picked], picked, epoch)
    single = [transform(stored[[i]], np.array([i]), epoch)[0] for i in indices]
    assert np.array_equal(together, np.stack(single))


@pytest.mark.parametrize("other", [{"epoch": 1}, {"seed": 1}], ids=["epoch", "seed"])
def test_another_epoch_or_seed_gives_other_crops(other):
    stored, indices = rows(*[noise(30, 20)] * 8), np.arange(8)
    first = augment()(stored, indices, 0)
    second = augment(seed=other.get("seed", 0))(stored, indices, other.get("epoch", 0))
    assert (first != second).any(axis=(1, 2, 3)).all()


def test_plain_epochs_use_whole_squares_and_the_centre_of_other_images():
    images = [Image.linear_gradient("L").resize(s).convert("RGB") for s in ((24, 24), (36, 24))]
    stored, transform = rows(*images), augment(plain_from_epoch=3)
    whole = [
        image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=(left, 0, left + 24, 24))
        for image, left in zip(images, (0, 6), strict=True)
    ]
    expected = np.stack([np.asarray(image) for image in whole]).transpose(0, 3, 1, 2) / 255
    for epoch in (3, 4, 90):
        assert transform(stored, np.arange(2), epoch) == pytest.approx(expected, abs=2 / 255)
    assert transform(stored, np.arange(2), 2) != pytest.approx(expected, abs=2 / 255)


def test_about_half_of_the_samples_are_mirrored():
    ramp = np.zeros((20, 20, 3), dtype=np.uint8) + np.arange(20, dtype=np.uint8)[:, None] * 12
    stored = rows(*[Image.fromarray(ramp)] * 400)
    shown = augment()(stored, np.arange(400), 0)
    mirrored = shown[:, 0, :, 0].mean(axis=1) > shown[:, 0, :, -1].mean(axis=1)
    assert 150 < mirrored.sum() < 250


def test_shrinking_averages_pixels():
    checks = (np.indices((30, 30)).sum(axis=0) % 2 * 255).astype(np.uint8)
    board = Image.fromarray(np.repeat(checks[..., None], 3, axis=2))
    transform = augment(size=8, area=(0.9, 1.0), aspect=(1.0, 1.0))
    shown = transform(rows(board), np.arange(1), 0)
    assert shown == pytest.approx(np.full(shown.shape, 0.5), abs=0.1)


def test_the_rest_of_a_row_is_filled_with_0():
    row = np.full(Form(30, is_whole=True).shape, 9, dtype=np.uint8)
    write_row(row, EXTENT.pack(2, 1) + b"abcdef")
    assert np.array_equal(image_sizes(row[None]), [[2, 1]])
    assert row[8:14].tobytes() == b"abcdef"
    assert not row[14:].any()


def test_no_samples_give_an_array_of_length_zero():
    assert augment()(rows(), np.arange(0), 0).shape == (0, 3, SIZE, SIZE)
